"""Damage on purpose: flipped bits in chunk files, and every system call of the write path broken once.

Flips: in files of every codec, encrypted and not, each bit of the header, each byte of what lies between header and
payload, and 1,000 random bits of the payload; each damaged file is offered to the store's public `load`. Calls: see
`tests.faults.syscalls`; a process saves, rewrites, forgets and evicts while one call fails, stops half way or is the
process's last; then another process looks at what is left.

python -m benchmarks.memory.faults [--quick]
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memory.kv.chunk import HEADER_BYTES
from memory.kv.fidelity import Fidelity
from memory.kv.settings import KVSettings
from memory.kv.store import KVStore
from tests.faults.syscalls import Sweep, compiler
from tests.faults.syscalls_child import CHUNK, FIRST, MODEL, kv_like

PAYLOAD_FLIPS = 1000
QUICK_STEP = 16
FILES: list[tuple[Fidelity, bool]] = [
    ("exact", True),
    ("exact", False),
    ("int8", True),
    ("int4", True),
    ("int4", False),
]
EACH_CALL = ("fail", "short", "kill", "torn")
"""Ways that every call is broken in; of the others, in which all later calls fail too, every tenth."""
LATER_STEP = 10


def flips(*, quick: bool = False) -> dict[str, int]:
    """How many damaged files were offered, and how many of them were taken for whole."""
    tried = accepted = 0
    with tempfile.TemporaryDirectory(prefix="kvloop-flips-") as name:
        for codec, encryption in FILES:
            settings = KVSettings(
                chunk_tokens=CHUNK,
                codec=codec,
                encryption=encryption,
                ram_bytes=0,
                disk_reserve_bytes=0,
                quarantine_bytes=0,
                upkeep_seconds=0.0,
            )
            with KVStore(settings, Path(name) / f"{codec}-{encryption}") as store:
                results = list(_flip_each(store, Path(name) / f"{codec}-{encryption}", quick=quick))
            tried += len(results)
            accepted += sum(results)
    return {"flips_tried": tried, "flips_accepted": accepted}


def _flip_each(store: KVStore, folder: Path, *, quick: bool) -> Iterator[bool]:
    """For each flip whether the store took the file."""
    ids = FIRST[:CHUNK]
    store.save(MODEL, ids, kv_like(ids), owner="one")
    if not store.flush(60):
        raise RuntimeError("the chunk was not written in time")
    path = next(folder.glob("chunks/*/*/*.kv"))
    whole = path.read_bytes()
    match = store.match(MODEL, ids)
    out = np.zeros(MODEL.shape(len(ids)), MODEL.dtype)
    for bit in _bits(len(whole), quick=quick):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        yield store.load(MODEL, match, out) > 0
    path.write_bytes(whole)
    if store.load(MODEL, match, out) != len(ids):
        raise RuntimeError("the undamaged file was refused: the flips prove nothing")


def _bits(size: int, *, quick: bool) -> list[int]:
    rng = np.random.default_rng(0)
    between = HEADER_BYTES + 8 * (CHUNK // 16) + 4 * CHUNK
    header = list(range(8 * HEADER_BYTES))
    middle = [8 * place + int(rng.integers(8)) for place in range(HEADER_BYTES, between)]
    payload = [int(bit) for bit in rng.choice(np.arange(8 * between, 8 * size), PAYLOAD_FLIPS, replace=False)]
    return [*header, *middle, *payload][:: QUICK_STEP if quick else 1]


def syscalls(*, quick: bool = False) -> dict[str, Any]:
    """How many calls were broken, and how often something wrong came back or an error was not expected."""
    if compiler() is None:
        return {"syscalls_failed": None, "wrong_answers": None, "unhandled": None}
    failed = wrong = unhandled = 0
    with Sweep() as sweep:
        every = sweep.faults()
        faults = [fault for fault in every if fault[1] in EACH_CALL]
        faults += [fault for fault in every if fault[1] not in EACH_CALL][::LATER_STEP]
        for outcome in sweep.run(sweep.sample(1) if quick else faults):
            failed += outcome.happened
            wrong += bool(outcome.wrong)
            unhandled += bool(outcome.unhandled)
            if outcome.wrong or outcome.unhandled:
                print(outcome)
    return {"syscalls_failed": failed, "wrong_answers": wrong, "unhandled": unhandled}


def measure(*, quick: bool = False) -> dict[str, Any]:
    """The figures of this module."""
    logging.getLogger("memory.kv").setLevel(logging.CRITICAL)  # thousands of refused files, each told
    try:
        return {**flips(quick=quick), **syscalls(quick=quick)}
    finally:
        logging.getLogger("memory.kv").setLevel(logging.NOTSET)


def main() -> None:
    """Measures and prints one line of JSON."""
    parser = argparse.ArgumentParser(description="flipped bits and broken system calls")
    parser.add_argument("--quick", action="store_true", help="a sample")
    print(json.dumps(measure(quick=parser.parse_args().quick)))


if __name__ == "__main__":
    main()
