"""Decode and prefill of the embedded engine against Hugging Face, as ratios measured in one process.

Both run the same model in bf16 on one thread. Pairs are interleaved, so that a noisy neighbour hits both, and the
figure is the median of the pairs' ratios. The ratios named `_cpu` are of CPU seconds, which other processes on the
machine distort least. Prints one line of JSON.

    python -m evals.engine_speed [--model FOLDER]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import queue
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from serve.engine import load_engine
from serve.engine.engine import Engine
from serve.engine.request import Event, FailedEvent, Request, Sampling, TokenEvent
from serve.engine.settings import EngineSettings
from serve.pull import DEFAULT_MODEL, pull

PREFILL_TOKENS = 1024
SHORT_PROMPT_TOKENS = 32
DECODE_TOKENS = 32


@dataclass(frozen=True)
class Stamp:
    """A moment, in seconds of wall clock and in CPU seconds of this process."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Stamp:
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: Stamp) -> Stamp:
        return Stamp(self.wall - other.wall, self.cpu - other.cpu)


@dataclass(frozen=True)
class Times:
    """Until the first token, and between tokens after it (the median)."""

    first: Stamp
    each: Stamp

    @classmethod
    def of(cls, began: Stamp, stamps: list[Stamp]) -> Times:
        gaps = [later - earlier for earlier, later in itertools.pairwise(stamps)]
        each = Stamp(statistics.median(gap.wall for gap in gaps), statistics.median(gap.cpu for gap in gaps))
        return cls(stamps[0] - began, each)


class Ours:
    """The engine as a request sees it: queue, scheduler, sampler and all."""

    def __init__(self, model: Path) -> None:
        self._engine: Engine = load_engine(EngineSettings(model=model, threads=1))

    def times(self, prompt: tuple[int, ...], tokens: int) -> Times:
        """Generates `tokens` tokens after `prompt`."""
        stamps: list[Stamp] = []
        ended: queue.SimpleQueue[Event] = queue.SimpleQueue()

        def listen(event: Event) -> None:
            if isinstance(event, TokenEvent):
                stamps.append(Stamp.now())
            else:
                ended.put(event)

        sampling = Sampling(max_tokens=tokens, temperature=0, ignore_eos=True)
        began = Stamp.now()
        self._engine.submit([Request("base", prompt, sampling)], listen)
        last = ended.get()
        if isinstance(last, FailedEvent):
            raise last.error
        return Times.of(began, stamps)

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()


class Stamps:
    """Notes when `generate` hands tokens over; it has what a streamer of transformers has."""

    def __init__(self) -> None:
        self.seen: list[Stamp] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, then with each token."""
        self.seen.append(Stamp.now())

    def end(self) -> None:
        """Called after the last token."""


class HuggingFace:
    """`generate` of transformers, greedy."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def times(self, prompt: tuple[int, ...], tokens: int) -> Times:
        """Generates `tokens` tokens after `prompt`."""
        streamer = Stamps()
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "streamer": streamer}
        began = Stamp.now()
        with torch.inference_mode():
            self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return Times.of(began, streamer.seen[1:])


def measure(model: Path, pairs: int) -> dict[str, float]:
    """Returns the figures; ratios above 1 mean that the engine is faster."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    long = tuple(torch.randint(3, 40_000, (PREFILL_TOKENS,), generator=generator).tolist())
    ours, theirs = Ours(model), HuggingFace(model)
    rows: dict[str, list[tuple[Stamp, Stamp]]] = {"prefill": [], "decode": [], "decode_1024": []}
    gc.disable()
    try:
        for pair in range(pairs + 1):
            order: tuple[Ours | HuggingFace, ...] = (ours, theirs) if pair % 2 else (theirs, ours)
            after_long = {engine: engine.times(long, DECODE_TOKENS) for engine in order}
            after_short = {engine: engine.times(long[:SHORT_PROMPT_TOKENS], DECODE_TOKENS) for engine in order}
            if pair:  # the first warms both up
                rows["prefill"].append((after_long[ours].first, after_long[theirs].first))
                rows["decode"].append((after_short[ours].each, after_short[theirs].each))
                rows["decode_1024"].append((after_long[ours].each, after_long[theirs].each))
    finally:
        ours.close()
    return _figures(rows)


def _figures(rows: dict[str, list[tuple[Stamp, Stamp]]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, pairs in rows.items():
        tokens = PREFILL_TOKENS if name == "prefill" else 1
        figures[f"{name}_over_hf"] = statistics.median(theirs.wall / our.wall for our, theirs in pairs)
        figures[f"{name}_over_hf_cpu"] = statistics.median(theirs.cpu / our.cpu for our, theirs in pairs)
        figures[f"{name}_tokens_per_second"] = tokens / statistics.median(our.wall for our, _ in pairs)
        figures[f"hf_{name}_tokens_per_second"] = tokens / statistics.median(theirs.wall for _, theirs in pairs)
    return figures


def main() -> None:
    """Measures and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the default model's name, or a model's folder")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs")
    arguments = parser.parse_args()
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kvloop" / "models"
    figures = measure(pull(arguments.model, cache), arguments.pairs)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
