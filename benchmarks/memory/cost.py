"""Load, recompute or split: what the cost model's choice takes against the better of the two pure choices.

cost_worst_ratio     the largest, over codecs and lengths, of the chosen turn's time over the better pure one's
cost_ratios          by codec, then by tokens of the session: that ratio
cost_chosen_tokens   by codec, then by tokens: how many of them the model chose to load

A turn is the session's tokens and 16 new ones, asked of the engine with the bundled model; its time is that to the
first token. Three engines' worth of turns are asked one after the other in each round (everything loaded, everything
computed, the model's choice), so that a slower minute slows all of them; what is told is the median over the rounds of
the ratio within a round, in CPU time plus what the disk was made to wait. `slow` is the exact codec on a disk of 15
MB/s, where computing is about as fast as loading: the wait is added to each read. Each engine begins without any
measurement but those of its warm-up, and answers a few turns of its own before.

python -m benchmarks.memory.cost [--rounds 3] [--lengths 64,512]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory.session import benchmark_model, load_session
from memory.kv.fidelity import Fidelity
from memory.kv.match import Match
from memory.kv.settings import KVSettings
from memory.kv.store import KVStore
from serve.engine.bands import as_array, identity_of
from serve.engine.engine import Engine
from serve.engine.kv_memory import KVMemory
from serve.engine.model import Run
from serve.engine.request import KVOptions, Request, Sampling
from serve.engine.settings import EngineSettings
from serve.engine.versions import Version
from serve.engine.weights import load_decoder

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8000)
NEW_TOKENS = 16
SLOW_DISK = 15e6
REPEATED_TOKENS, MOST_REPEATS = 2048, 8
CODECS: dict[str, Fidelity] = {"exact": "exact", "int8": "int8", "int4": "int4", "slow": "exact"}
ONE_TOKEN = Sampling(max_tokens=1, temperature=0)
Choose = Callable[[Match, int], int]


@dataclass
class Subject:
    """An engine with its own store, whose loads may be slowed down and whose choices may be overruled."""

    engine: Engine
    slow: bool
    waited: float = 0.0
    chosen: int = 0
    overrule: Choose | None = None
    _choose: Callable[..., int] = field(init=False)

    def __post_init__(self) -> None:
        store = _memory(self.engine).store
        self._choose = store.cost.tokens_to_load
        store.cost.tokens_to_load = self._decide  # type: ignore[method-assign]
        disk: Any = store._disk
        read = disk.read

        def slow_read(ref: Any, *arguments: Any) -> Any:
            began = time.thread_time()
            found = read(ref, *arguments)
            if self.slow:
                pause = max(0.0, ref.size / SLOW_DISK - (time.thread_time() - began))
                time.sleep(pause)
                self.waited += pause
            return found

        disk.read = slow_read

    def _decide(self, match: Match, total: int, beside: Match | None = None) -> int:
        self.chosen = self.overrule(match, total) if self.overrule else self._choose(match, total, beside)
        return self.chosen

    def turn(self, token_ids: Sequence[int], overrule: Choose | None) -> float:
        """Seconds to the first token of a turn."""
        self.overrule, self.waited = overrule, 0.0
        began = time.process_time()
        self.engine.generate([Request("base", tuple(token_ids), ONE_TOKEN, kv=KVOptions(save=False))])
        return time.process_time() - began + self.waited


def _memory(engine: Engine) -> KVMemory:
    if engine.memory is None:
        raise RuntimeError("the benchmark's engine has no memory")
    return engine.memory


def _all_of_it(match: Match, total: int) -> int:
    return match.tokens


def _none_of_it(match: Match, total: int) -> int:
    return 0


@contextmanager
def _subjects(model: Path, sessions: Sequence[Sequence[int]]) -> Iterator[dict[str, Subject]]:
    """One engine for each codec, all with the same weights, whose stores hold all sessions."""
    torch.set_num_threads(1)
    decoder = load_decoder(model, torch.bfloat16)
    base = Version("base", model, "benchmark", "bf16", decoder)
    with tempfile.TemporaryDirectory(prefix="kvloop-cost-") as root:
        subjects = {}
        for name, codec in CODECS.items():
            kv = KVSettings(codec=codec, ram_bytes=0, upkeep_seconds=0, load_threads=1, disk_reserve_bytes=0)
            settings = EngineSettings(model=model, kv=kv)
            subjects[name] = Subject(Engine(settings, base, KVMemory(KVStore(kv, Path(root) / name))), name == "slow")
        for session in sessions:
            array = decoder.new_kv(len(session))
            with torch.inference_mode():
                for start in range(0, len(session), 512):
                    decoder.forward([Run(session[start : start + 512], start, array)])
            for subject in subjects.values():
                store = _memory(subject.engine).store
                store.save(identity_of(base, ""), session, as_array(array))
                if not store.flush(120):
                    raise RuntimeError("the benchmark's sessions were not stored in time")
        try:
            yield subjects
        finally:
            for subject in subjects.values():
                subject.engine.close()


def measure(rounds: int = 3, lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """The figures that the module's docstring names."""
    model = benchmark_model()
    text = load_session(model, 2 * max(lengths) + 2 * NEW_TOKENS).history
    sessions = {length: text[length : 2 * length] for length in lengths}
    new = text[-NEW_TOKENS:]
    ratios: dict[str, dict[int, list[float]]] = {name: {length: [] for length in lengths} for name in CODECS}
    chosen: dict[str, dict[str, int]] = {name: {} for name in CODECS}
    with _subjects(model, list(sessions.values())) as subjects:
        for subject in subjects.values():
            for length in lengths[:4]:
                subject.turn((*sessions[length], *new), None)
        for number in range(rounds):
            for length, session in sessions.items():
                prompt = (*session, *new)
                for repeat in range(max(1, min(MOST_REPEATS, REPEATED_TOKENS // length))):
                    computed = next(iter(subjects.values())).turn(prompt, _none_of_it)
                    for name, subject in subjects.items():
                        took, loaded = _pair(subject, prompt, turned=bool((number + repeat) % 2))
                        chosen[name][str(length)] = subject.chosen
                        ratios[name][length].append(took / min(loaded, computed))
    table = {
        name: {str(length): statistics.median(found) for length, found in by_length.items()}
        for name, by_length in ratios.items()
    }
    worst = max(ratio for by_length in table.values() for ratio in by_length.values())
    return {"cost_worst_ratio": worst, "cost_ratios": table, "cost_chosen_tokens": chosen}


def _pair(subject: Subject, prompt: Sequence[int], *, turned: bool) -> tuple[float, float]:
    """The model's choice and loading everything, asked in turns of order."""
    if turned:
        loaded = subject.turn(prompt, _all_of_it)
        return subject.turn(prompt, None), loaded
    took, chosen = subject.turn(prompt, None), subject.chosen
    loaded = subject.turn(prompt, _all_of_it)
    subject.chosen = chosen
    return took, loaded


def main() -> None:
    """Prints a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description="The cost model's choice against the better pure one.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    arguments = parser.parse_args()
    figures = measure(arguments.rounds, [int(length) for length in arguments.lengths.split(",")])
    print(f"{'tokens':>8}" + "".join(f"{name:>18}" for name in figures["cost_ratios"]))
    for length in next(iter(figures["cost_ratios"].values())):
        cells = (
            f"{figures['cost_ratios'][name][length]:>9.3f} ({figures['cost_chosen_tokens'][name][length]:>5})"
            for name in figures["cost_ratios"]
        )
        print(f"{length:>8}" + "".join(f"{cell:>18}" for cell in cells))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
