"""vLLM on CPU with its ExampleConnector: KV of whole blocks in safetensors files, found by the prompt's hash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peer_process import WARM_UP, Config, run


def load_model(config: Config) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": config["store"]},
    )
    llm = LLM(
        config["model"],
        max_model_len=len(config["history"]) + 512,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_transfer_config=connector,
        disable_log_stats=True,
    )
    first_token(llm, WARM_UP)
    return llm


def first_token(llm: Any, ids: list[int]) -> tuple[int, int]:
    """Tokens of the prompt whose KV was loaded, and the first token of the reply."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    reply = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
    return reply[0].num_cached_tokens or 0, int(reply[0].outputs[0].token_ids[0])


def save(config: Config) -> None:
    first_token(load_model(config), config["history"] + config["turn"][:1])


def prepare(config: Config) -> Callable[[], tuple[int, int]]:
    llm = load_model(config)

    def resume() -> tuple[int, int]:
        return first_token(llm, config["history"] + config["turn"])

    return resume


if __name__ == "__main__":
    run(save, prepare)
