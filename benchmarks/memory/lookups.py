"""How long looking chunks up takes among a million, what a write costs the index there, and how fast it is built anew.

lookup_p99_us        99th percentile of the time that the index takes to find the 16 chunks of a session
lookup_one_p99_us    the same for one key
lookup_cpu_p99_us    CPU time of the lookup of 16 alone: what is left when the machine is busy with other things
siblings_p99_us      lengths and latest followers of a parent that tens of thousands of chunks follow
index_write_us       CPU time of entering a chunk, marking it stored, and evicting another
rebuild_files_s      files read, proven by their seal and entered, a second, from an empty index to one that answers
"""

from __future__ import annotations

import json
import resource
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from memory.kv.chunk import ChunkHeader, body_bytes, pack_chunk
from memory.kv.tiers.index import Index, Row
from memory.kv.tiers.rebuild import scan_rows

CHUNKS = 1_000_000
FILES = 100_000
CHUNK_TOKENS = 256
SESSION_CHUNKS = 16
LOOKUPS = 3000
NOBODY = bytes(16)
ROOT = blake3(b"root").digest()


def key_of(number: int) -> bytes:
    """A key that is as random as any other, and can be made again."""
    return blake3(number.to_bytes(8, "little")).digest()


def row_of(number: int) -> Row:
    """Chunk `number` of sessions of `SESSION_CHUNKS` chunks each, all of which begin below one root."""
    place = number % SESSION_CHUNKS
    return Row(
        key=key_of(number),
        parent=key_of(number - 1) if place else ROOT,
        start=place * CHUNK_TOKENS,
        tokens=CHUNK_TOKENS,
        prefix=key_of(number) * 4,
        size=1_000_000,
        codec="exact",
        fidelity="exact",
        model=NOBODY,
        band="all",
        owner=key_of(number // 64)[:16],
        expires=0.0,
        last_used=1e9 + number,
        raw_bytes=1_500_000,
    )


@dataclass(frozen=True, slots=True)
class Times:
    """99th percentiles in microseconds."""

    passed: float
    """Of the time that passed, over the calls that no other process interrupted."""
    busy: float
    """Of CPU time, over all calls."""
    interrupted: float
    """Share of the calls that were interrupted: the machine had other things to do."""


def times_of(work: Callable[[int], object], numbers: Sequence[int]) -> Times:
    """How long `work` takes for each of the numbers, after a few that warm it up."""
    for number in numbers[: len(numbers) // 10]:
        work(number)
    passed, busy, whole = [], [], []
    for number in numbers:
        taken_away = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        started, cpu = time.perf_counter_ns(), time.thread_time_ns()
        work(number)
        busy.append(time.thread_time_ns() - cpu)
        passed.append(time.perf_counter_ns() - started)
        whole.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw == taken_away)
    alone = np.asarray(passed)[np.asarray(whole)]
    return Times(
        passed=float(np.percentile(alone, 99)) / 1000,
        busy=float(np.percentile(busy, 99)) / 1000,
        interrupted=1 - len(alone) / len(passed),
    )


def measure_lookups(folder: Path, chunks: int = CHUNKS) -> dict[str, float]:
    """Lookups and writes in an index of that many chunks."""
    index = Index.build(folder / "index.db", map(row_of, range(chunks)))
    try:
        rng = np.random.default_rng(0)
        sessions = rng.integers(0, chunks // SESSION_CHUNKS, LOOKUPS).tolist()

        def look(session: int) -> None:
            first = session * SESSION_CHUNKS
            found = index.find([key_of(number) for number in range(first, first + SESSION_CHUNKS)])
            assert len(found) == SESSION_CHUNKS

        def look_for_one(number: int) -> None:
            assert index.find([key_of(number)])

        def look_at_followers(_: int) -> None:
            assert index.lengths(ROOT) == [CHUNK_TOKENS]
            assert index.siblings(ROOT, 64)

        session = times_of(look, sessions)
        return {
            "lookup_p99_us": session.passed,
            "lookup_cpu_p99_us": session.busy,
            "lookups_interrupted": session.interrupted,
            "lookup_one_p99_us": times_of(look_for_one, rng.integers(0, chunks, LOOKUPS).tolist()).passed,
            "siblings_p99_us": times_of(look_at_followers, sessions).passed,
            "index_write_us": write_cost(index, chunks),
        }
    finally:
        index.close()


def write_cost(index: Index, chunks: int, writes: int = 1000) -> float:
    """CPU time in microseconds of what one write asks of a full index."""
    started = time.process_time()
    for number in range(chunks, chunks + writes):
        index.totals()
        leaving = index.least_worth(1)
        index.remove([leaving[0].key])
        index.enter(row_of(number))
        index.stored(key_of(number))
    return (time.process_time() - started) / writes * 1e6


def write_files(folder: Path, files: int) -> None:
    """That many chunk files, whole but with a payload of a few bytes."""
    ids, prefix, payload = np.zeros(CHUNK_TOKENS, "<u4"), bytes(CHUNK_TOKENS // 2), secrets.token_bytes(64)
    for first in range(256):
        (folder / f"{first:02x}"[0] / f"{first:02x}"[1]).mkdir(parents=True)
    for number in range(files):
        row = row_of(number)
        header = ChunkHeader(
            key=row.key,
            parent=row.parent,
            identity=ROOT,
            model=row.model,
            band=row.band,
            start=row.start,
            shape=(30, 2, 3, CHUNK_TOKENS, 64),
            dtype="bfloat16",
            codec=row.codec,
            fidelity=row.fidelity,
            body_bytes=body_bytes(CHUNK_TOKENS, len(payload), encrypted=False),
            created=row.last_used,
            expires=row.expires,
            owner=row.owner,
        )
        name = row.key.hex()
        path = folder / name[0] / name[1] / f"{name}.kv"
        path.write_bytes(pack_chunk(header, prefix, ids, payload, None))


def measure_rebuild(folder: Path, files: int = FILES) -> dict[str, float]:
    """Building the index from files that are there."""
    write_files(folder / "chunks", files)

    def rows() -> Iterator[Row]:
        def refuse(key: bytes, error: Exception) -> None:
            raise AssertionError(f"{key.hex()} was refused") from error

        return scan_rows(folder / "chunks", refuse)

    passed, busy = [], []
    for _ in range(2):
        started, cpu = time.perf_counter(), time.process_time()
        index = Index.build(folder / "index.db", rows())
        busy.append(time.process_time() - cpu)
        passed.append(time.perf_counter() - started)
        assert index.totals()[0] == files
        index.close()
    return {"rebuild_files_s": files / min(passed), "rebuild_cpu_files_s": files / min(busy)}


def measure() -> dict[str, float]:
    """All of it; about a minute, and 2 GB of disk for that time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return measure_lookups(folder) | measure_rebuild(folder / "files")


def main() -> None:
    """Prints one JSON object."""
    print(json.dumps({name: round(value, 1) for name, value in measure().items()}))


if __name__ == "__main__":
    main()
