"""A prompt of 200,000 tokens on a tiny random model: computed in pieces, stored meanwhile, restored, partly reused.

long_prefill_s, long_stored_share     the whole prompt, and how much of it was stored when its last step began
long_restore_s                        the same prompt in a fresh engine, by the choice of the cost model overruled
long_edit_reused, long_end_reused     share reused after an edit in the middle, and after one at the end
long_growth_mib, long_allowed_mib     growth of the process's memory at its peak, and the sum of the budgets for it
long_host_share                       CPU time of the last steps outside of attention over that of the first ones

python -m benchmarks.memory.long_context [--tokens 200000]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from memory.kv.match import Match
from memory.kv.settings import KVSettings
from serve.engine import load_engine
from serve.engine import model as engine_model
from serve.engine.bands import identity_of
from serve.engine.engine import Engine
from serve.engine.request import Request, Sampling, Usage
from serve.engine.settings import EngineSettings
from serve.engine.stepper import Stepper

TOKENS = 200_000
VOCABULARY = 1000
MIB = 1 << 20
KV = KVSettings(
    ram_bytes=8 * MIB, queue_bytes=8 * MIB, disk_reserve_bytes=0, upkeep_seconds=0, load_threads=1, quarantine_bytes=0
)
SCRATCH_BYTES = 128 * MIB
"""Beside the budgets: activations and scores of one step, the prompt's ids in several forms, the index's cache."""
FIRST_STEPS = 32


def build_model(folder: Path, context: int) -> Path:
    """Saves two random layers of one head of 16 numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=context,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Watch:
    """The largest resident size while it runs, over that at its start."""

    def __init__(self) -> None:
        self._start = self.peak = _resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Growth in MiB."""
        self._done.set()
        self._thread.join()
        return (self.peak - self._start) / MIB

    def _run(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, _resident())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@contextmanager
def _engine(model: Path, folder: Path, tokens: int) -> Iterator[Engine]:
    settings = EngineSettings(model=model, dtype="float32", kv_folder=folder, kv=KV, kv_warm_bytes=0)
    engine = load_engine(settings)
    memory = engine.memory
    assert memory is not None
    memory.store.cost.tokens_to_load = _everything  # type: ignore[method-assign]  # computing is a matter of taste here
    try:
        yield engine
    finally:
        engine.close()


def _everything(match: Match, total: int, beside: Match | None = None) -> int:
    return match.tokens


def _ask(engine: Engine, prompt: tuple[int, ...]) -> tuple[Usage, float]:
    began = time.monotonic()
    usage = engine.generate([Request("base", prompt, Sampling(max_tokens=0))])[0].usage
    return usage, time.monotonic() - began


class Steps:
    """CPU time of each step outside of attention, and what is stored when the last begins."""

    def __init__(self, tokens: int) -> None:
        self.seconds: list[float] = []
        self.stored = 0
        self._attention = 0.0
        self._tokens = tokens

    @contextmanager
    def watched(self, engine: Engine, prompt: tuple[int, ...]) -> Iterator[None]:
        """While this is entered, steps are timed."""
        execute, attend = Stepper.execute, engine_model.attend
        store = engine.memory.store if engine.memory is not None else None
        identity = identity_of(engine.versions.base, "")
        steps = self

        def timed_attend(*arguments: Any) -> None:
            began = time.thread_time()
            attend(*arguments)
            steps._attention += time.thread_time() - began

        def timed(self: Stepper, step: Any) -> None:
            if step.works[0].sequence.remaining <= step.works[0].count and store is not None:
                steps.stored = store.match(identity, prompt).tokens
            began, steps._attention = time.thread_time(), 0.0
            execute(self, step)
            steps.seconds.append(time.thread_time() - began - steps._attention)

        Stepper.execute, engine_model.attend = timed, timed_attend  # type: ignore[method-assign]
        try:
            yield
        finally:
            Stepper.execute, engine_model.attend = execute, attend  # type: ignore[method-assign]


def measure(tokens: int = TOKENS) -> dict[str, float]:
    """The figures that the module's docstring names."""
    generator = torch.Generator().manual_seed(1)
    prompt = tuple(torch.randint(3, VOCABULARY, (tokens,), generator=generator).tolist())
    middle = tokens // 2
    edited = (*prompt[:middle], 1, 2, *prompt[middle + 2 :])
    ended = (*prompt[:-1], 1)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="kvloop-long-") as root:
        model, folder = build_model(Path(root) / "model", tokens + 1024), Path(root) / "kv"
        steps = Steps(tokens)
        with _engine(model, folder, tokens) as engine:
            buffers = engine.versions.base.decoder.kv_bytes_per_token * tokens
            watch = Watch()
            with steps.watched(engine, prompt):
                _, figures["long_prefill_s"] = _ask(engine, prompt)
            growth = watch.stop()
        figures["long_stored_share"] = steps.stored / tokens
        figures["long_host_share"] = sum(steps.seconds[-FIRST_STEPS - 1 : -1]) / sum(steps.seconds[1 : FIRST_STEPS + 1])
        with _engine(model, folder, tokens) as engine:
            watch = Watch()
            _, figures["long_restore_s"] = _ask(engine, prompt)
            usage, _ = _ask(engine, ended)
            figures["long_end_reused"] = usage.cached_tokens / tokens
            usage, _ = _ask(engine, edited)
            figures["long_edit_reused"] = usage.cached_tokens / tokens
            growth = max(growth, watch.stop())
        figures["long_growth_mib"] = growth
        figures["long_allowed_mib"] = (2 * buffers + KV.ram_bytes + KV.queue_bytes + SCRATCH_BYTES) / MIB
    return figures


def main() -> None:
    """Prints the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description="A long prompt on a tiny model.")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    figures = measure(parser.parse_args().tokens)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
