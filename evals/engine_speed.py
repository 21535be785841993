"""Decode and prefill of the embedded engine against Hugging Face, as ratios measured in one process.

Both run the same model in bf16 on one thread. Pairs are interleaved, so that a noisy neighbour hits both, and the
figure is the median of the pairs' ratios. Prints one line of JSON.

    python -m evals.engine_speed --model FOLDER
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from serve.engine import load_engine
from serve.engine.engine import Engine
from serve.engine.request import Event, Request, Sampling, TokenEvent
from serve.engine.settings import EngineSettings

PREFILL_TOKENS = 1024
SHORT_PROMPT_TOKENS = 32
DECODE_TOKENS = 32


class Ours:
    """The engine as a request sees it: queue, scheduler, sampler and all."""

    def __init__(self, model: Path) -> None:
        self._engine: Engine = load_engine(EngineSettings(model=model, threads=1))

    def times(self, prompt: tuple[int, ...], tokens: int) -> tuple[float, float]:
        """Returns seconds to the first token, and seconds per token after it."""
        stamps: list[float] = []

        def listen(event: Event) -> None:
            if isinstance(event, TokenEvent):
                stamps.append(time.perf_counter())

        began = time.perf_counter()
        sampling = Sampling(max_tokens=tokens, temperature=0, ignore_eos=True)
        ticket = self._engine.submit([Request("base", prompt, sampling)], listen)
        while len(stamps) < tokens:
            time.sleep(0.002)
        self._engine.abort(ticket)
        return stamps[0] - began, statistics.median(b - a for a, b in itertools.pairwise(stamps))

    def close(self) -> None:
        self._engine.close()


class HuggingFace:
    """`generate` of transformers, greedy, timed by a streamer at each token."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def times(self, prompt: tuple[int, ...], tokens: int) -> tuple[float, float]:
        """Returns seconds to the first token, and seconds per token after it."""
        from transformers.generation.streamers import BaseStreamer

        stamps: list[float] = []

        class Stamps(BaseStreamer):  # type: ignore[misc]
            def put(self, value: torch.Tensor) -> None:
                stamps.append(time.perf_counter())

            def end(self) -> None:
                return

        began = time.perf_counter()
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "streamer": Stamps()}
        with torch.inference_mode():
            self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        stamps = stamps[1:]  # the first call hands over the prompt
        return stamps[0] - began, statistics.median(b - a for a, b in itertools.pairwise(stamps))


def measure(model: Path, pairs: int) -> dict[str, float]:
    """Returns the figures; ratios above 1 mean that the engine is faster."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    long = tuple(torch.randint(3, 40_000, (PREFILL_TOKENS,), generator=generator).tolist())
    short = long[:SHORT_PROMPT_TOKENS]
    ours, theirs = Ours(model), HuggingFace(model)
    gc.disable()
    rows: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode_32": [], "decode_1024": []}
    try:
        for pair in range(pairs + 1):
            engines = (ours, theirs) if pair % 2 else (theirs, ours)
            found: dict[str, dict[object, float]] = {name: {} for name in rows}
            for engine in engines:
                found["prefill"][engine], found["decode_1024"][engine] = engine.times(long, DECODE_TOKENS)
                _, found["decode_32"][engine] = engine.times(short, DECODE_TOKENS)
            if pair:  # the first warms both up
                for name, seconds in found.items():
                    rows[name].append((seconds[ours], seconds[theirs]))
    finally:
        ours.close()
    return _figures(rows)


def _figures(rows: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    ratio = {name: statistics.median(theirs / our for our, theirs in pairs) for name, pairs in rows.items()}
    our = {name: statistics.median(our for our, _ in pairs) for name, pairs in rows.items()}
    their = {name: statistics.median(theirs for _, theirs in pairs) for name, pairs in rows.items()}
    return {
        "decode_over_hf": ratio["decode_32"],
        "decode_1024_over_hf": ratio["decode_1024"],
        "prefill_over_hf": ratio["prefill"],
        "decode_tokens_per_second": 1 / our["decode_32"],
        "decode_1024_tokens_per_second": 1 / our["decode_1024"],
        "prefill_tokens_per_second": PREFILL_TOKENS / our["prefill"],
        "hf_decode_tokens_per_second": 1 / their["decode_32"],
        "hf_decode_1024_tokens_per_second": 1 / their["decode_1024"],
        "hf_prefill_tokens_per_second": PREFILL_TOKENS / their["prefill"],
    }


def main() -> None:
    """Measures and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs")
    arguments = parser.parse_args()
    figures = measure(arguments.model, arguments.pairs)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
