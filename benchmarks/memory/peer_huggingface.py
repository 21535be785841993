"""Hugging Face transformers: the cache's tensors through `torch.save` and `torch.load`, in bf16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peer_process import WARM_UP, Config, run
from transformers import AutoModelForCausalLM, DynamicCache


def load_model(config: Config) -> Any:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.bfloat16).eval()
    forward(model, WARM_UP, DynamicCache())
    return model


def forward(model: Any, ids: list[int], cache: Any) -> torch.Tensor:
    """Logits of the last token; the cache grows by the KV of `ids`."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1).logits
    return logits[0, -1]


def save(config: Config) -> None:
    cache = DynamicCache()
    forward(load_model(config), config["history"], cache)
    torch.save([(layer.keys, layer.values) for layer in cache.layers], Path(config["store"]) / "cache.pt")


def prepare(config: Config) -> Callable[[], tuple[int, int]]:
    model = load_model(config)

    def resume() -> tuple[int, int]:
        stored = torch.load(Path(config["store"]) / "cache.pt", mmap=config["mmap"])
        cache = DynamicCache()
        for number, (keys, values) in enumerate(stored):
            cache.update(keys, values, number)
        restored = cache.get_seq_length()
        return restored, int(forward(model, config["turn"], cache).argmax())

    return resume


if __name__ == "__main__":
    run(save, prepare)
