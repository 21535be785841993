"""What the store costs around the codecs: reading a session that no cache holds, and saving beside a running turn.

disk_share                 bytes of chunk files a second of a cold `load`, over those of the disk itself
disk_gb_s                  the disk: one sequential direct read of a file as large as the session's files together
cold_load_gb_s             by codec: bytes of chunk files a second of the cold load, which reads, proves and decodes
cold_load_share            by codec: that over the disk
cold_load_ms               by codec
store_overhead             by how much saving lengthens a turn on the engine's thread, in CPU time; median of pairs
store_overhead_wall        the same of the wall clock

The session is 4,000 tokens of the bundled model's size. Before each read the kernel is told to drop what it caches of
the files; loads and direct reads take turns. The turn is 512 prompt tokens and 32 generated ones, each asked with and
without saving.

python -m benchmarks.memory.store
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import queue
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory.codecs import synthetic_kv
from benchmarks.memory.session import SESSION_TOKENS, benchmark_model
from memory.kv.fidelity import Fidelity
from memory.kv.identity import LAYOUT, KVIdentity
from memory.kv.settings import KVSettings
from memory.kv.store import KVStore

CODECS: tuple[Fidelity, ...] = ("exact", "int8", "int4")
BLOCK = 1 << 20
IDENTITY = KVIdentity(
    weights_id="ab" * 32,
    compute_format="bf16",
    kv_dtype="bfloat16",
    layers=30,
    kv_heads=3,
    head_dim=64,
    layout=LAYOUT,
    rope="{}",
    attention="{}",
    tenant_secret="secret",
)
PROMPT_TOKENS, REPLY_TOKENS = 512, 32


# a cold session


def evict(paths: list[Path]) -> None:
    """Has the kernel write these files out and drop what it caches of them."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def direct_read_seconds(path: Path) -> float:
    """Seconds to read the file past the cache, in order."""
    evict([path])
    with mmap.mmap(-1, BLOCK) as buffer:  # aligned, as direct reads must be
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        began = time.perf_counter()
        while os.readv(descriptor, [buffer]):
            pass
        seconds = time.perf_counter() - began
        os.close(descriptor)
    return seconds


def cold_load_seconds(settings: KVSettings, folder: Path, ids: list[int]) -> float:
    """Seconds that a store just opened takes to load the session from files that are not cached."""
    out = np.zeros(IDENTITY.shape(len(ids)), IDENTITY.dtype)
    with KVStore(settings, folder) as store:
        match = store.match(IDENTITY, ids)
        evict(sorted(folder.glob("chunks/*/*/*.kv")))
        began = time.perf_counter()
        tokens = store.load(IDENTITY, match, out)
        seconds = time.perf_counter() - began
    if tokens != len(ids):
        raise RuntimeError(f"{tokens} of {len(ids)} tokens were loaded")
    return seconds


def cold_sessions(rounds: int, tokens: int) -> dict[str, Any]:
    """Loads of cold sessions beside direct reads."""
    ids = [int(value) for value in np.random.default_rng(0).integers(0, 49_000, tokens)]
    kv = synthetic_kv(IDENTITY.shape(tokens))
    loads: dict[str, list[float]] = {codec: [] for codec in CODECS}
    reads: dict[str, list[float]] = {codec: [] for codec in CODECS}
    sizes = {}
    with tempfile.TemporaryDirectory(prefix="kvloop-cold-", dir=Path.cwd()) as name:  # not /tmp: that may be memory
        folders, settings = {}, {}
        for codec in CODECS:
            folders[codec] = Path(name) / codec
            settings[codec] = KVSettings(codec=codec, ram_bytes=0, disk_reserve_bytes=0, upkeep_seconds=0.0)
            with KVStore(settings[codec], folders[codec]) as store:
                store.save(IDENTITY, ids, kv)
                if not store.flush(300):
                    raise RuntimeError("the session was not stored in time")
            sizes[codec] = sum(path.stat().st_size for path in folders[codec].glob("chunks/*/*/*.kv"))
            whole = -(-sizes[codec] // BLOCK) * BLOCK
            (Path(name) / f"{codec}.bin").write_bytes(np.random.default_rng(1).bytes(whole))
        for _ in range(rounds):
            for codec in CODECS:
                reads[codec].append(direct_read_seconds(Path(name) / f"{codec}.bin"))
                loads[codec].append(cold_load_seconds(settings[codec], folders[codec], ids))
    disk = {codec: sizes[codec] / statistics.median(reads[codec]) / 1e9 for codec in CODECS}
    load = {codec: sizes[codec] / statistics.median(loads[codec]) / 1e9 for codec in CODECS}
    shares = {
        codec: statistics.median(read / ours for read, ours in zip(reads[codec], loads[codec], strict=True))
        for codec in CODECS
    }
    return {
        "disk_share": shares["exact"],
        "disk_gb_s": disk["exact"],
        "cold_load_gb_s": load,
        "cold_load_share": shares,
        "cold_load_ms": {codec: 1000 * statistics.median(loads[codec]) for codec in CODECS},
    }


# saving beside a turn


@dataclass(frozen=True)
class Turn:
    """What one turn took: seconds until its last token, and of CPU on the engine's thread."""

    wall: float
    cpu: float


class Turns:
    """An engine with memory, which is asked. Close it."""

    def __init__(self, folder: Path) -> None:
        from serve.engine import load_engine
        from serve.engine.settings import EngineSettings

        kv = KVSettings(upkeep_seconds=0.0, disk_reserve_bytes=0)
        self._engine = load_engine(EngineSettings(model=benchmark_model(), threads=1, kv_folder=folder, kv=kv))
        self._thread = next(thread for thread in threading.enumerate() if thread.name == "engine").native_id
        self._rng = np.random.default_rng(0)

    def take(self, *, save: bool) -> Turn:
        """One turn with a prompt that nobody asked before."""
        from serve.engine.request import DoneEvent, Event, KVOptions, Request, Sampling

        prompt = tuple(int(value) for value in self._rng.integers(3, 40_000, PROMPT_TOKENS))
        sampling = Sampling(max_tokens=REPLY_TOKENS, temperature=0, ignore_eos=True)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        cpu, began = self._cpu(), time.perf_counter()
        self._engine.submit([Request("base", prompt, sampling, kv=KVOptions(save=save))], events.put)
        while not isinstance(events.get(), DoneEvent):
            pass
        turn = Turn(time.perf_counter() - began, self._cpu() - cpu)
        if self._engine.memory is None or not self._engine.memory.flush(60):
            raise RuntimeError("a turn was not stored in time")
        return turn

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()

    def _cpu(self) -> float:
        """Seconds that the engine's thread has computed."""
        return int(Path(f"/proc/self/task/{self._thread}/schedstat").read_text().split()[0]) / 1e9


def overhead(pairs: int) -> dict[str, float]:
    """By how much saving lengthens a turn, as a share of it."""
    with tempfile.TemporaryDirectory(prefix="kvloop-turns-") as name:
        turns = Turns(Path(name))
        try:
            for save in (True, False):
                turns.take(save=save)  # the first warms up
            taken = []
            for number in range(pairs):
                order = (True, False) if number % 2 else (False, True)
                pair = {save: turns.take(save=save) for save in order}
                taken.append((pair[True], pair[False]))
        finally:
            turns.close()
    return {
        "store_overhead": statistics.median(on.cpu / off.cpu for on, off in taken) - 1,
        "store_overhead_wall": statistics.median(on.wall / off.wall for on, off in taken) - 1,
    }


def measure(*, quick: bool = False) -> dict[str, Any]:
    """The figures of this module; about two minutes."""
    cold = cold_sessions(rounds=2 if quick else 9, tokens=512 if quick else SESSION_TOKENS)
    return {**cold, **overhead(pairs=1 if quick else 15)}


def main() -> None:
    """Measures and prints one line of JSON."""
    parser = argparse.ArgumentParser(description="cold sessions, and saving beside a turn")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    print(json.dumps(measure(quick=parser.parse_args().quick)))


if __name__ == "__main__":
    main()
