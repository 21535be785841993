"""What runs while system calls are broken: `python -m tests.faults.syscalls_child LIBRARY`, with that preloaded.

Reads a `Fault` as a line of JSON from stdin, forks, saves and forgets in the fork while the library breaks the call
that the fault names, and answers with a line of JSON: how the fork ended and which calls it made. Forking spares
starting Python for each of hundreds of faults.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sqlite3
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory.kv import keyring
from memory.kv.codec import native
from memory.kv.counters import Counters
from memory.kv.fidelity import FidelityRecord
from memory.kv.settings import KVSettings
from memory.kv.store import KVStore
from memory.kv.tiers import index as index_module
from memory.kv.upkeep import Upkeep
from tests.memory.kv.common import identity, kv_of, prompt

HANG_SECONDS = 60
CHUNK = 128
BUDGET = 60_000
BUSY_SECONDS = 0.2
"""How long a lock that is broken for good may be waited for: SQLite takes one that fails for one that is held."""
MODEL = identity(layers=2, kv_heads=1, head_dim=16)
OLD, DOOMED, FIRST, LAST = (prompt(2 * CHUNK + 7, seed=seed) for seed in range(4))
LONGER = FIRST + prompt(CHUNK, seed=9)
SEQUENCES = {"old": OLD, "doomed": DOOMED, "first": FIRST, "longer": LONGER, "last": LAST}
OWNERS = {"old": "one", "doomed": "two", "first": "one", "longer": "one", "last": "three"}


@dataclass(frozen=True)
class Fault:
    """Call number `at` of the scenario in `folder` is broken in one way; 0 breaks none."""

    scenario: str
    folder: str
    log: str
    at: int
    mode: int


def open_here(folder: Path) -> KVStore:
    """The store that is broken, and that is looked at afterwards."""
    settings = KVSettings(
        chunk_tokens=CHUNK,
        min_tokens=4,
        ram_bytes=0,
        disk_bytes=BUDGET,
        disk_reserve_bytes=0,
        keyring=folder / "keyring",
        lock_seconds=BUSY_SECONDS,
        retry_seconds=0.0,
        upkeep_seconds=0.0,
        int8_after_seconds=600.0,
    )
    return KVStore(settings, folder)


def kv_like(ids: list[int]) -> NDArray[Any]:
    """KV that depends on its tokens and that a lossy codec makes smaller: numbers of about one size."""
    bits = kv_of(ids, MODEL)
    return ((bits & 0x807F) | (((bits >> 7) & 3) + 124 << 7)).astype(bits.dtype)


def prepare(folder: Path) -> None:
    """A folder that was used before: two sequences, one of which will be forgotten; int8 is trusted."""
    with open_here(folder) as store:
        store.fidelity.put(
            FidelityRecord(
                weights_id_base=MODEL.weights_id,
                codec="int8",
                kl_mean=0.0,
                kl_p95=0.0,
                top1=1.0,
                tokens=1,
                noise_kl=0.0,
                bytes_per_token=1.0,
                ratio=2.0,
                measured_at=0.0,
            )
        )
        for name in ("old", "doomed"):
            save(store, name)
            assert store.flush(20)
        with upkeep_of(store) as upkeep:
            upkeep.step()  # what is due once after each start of the machine


def save(store: KVStore, name: str) -> None:
    """Saves a sequence of `SEQUENCES`."""
    store.save(MODEL, SEQUENCES[name], kv_like(SEQUENCES[name]), owner=OWNERS[name])


def restored(store: KVStore, name: str) -> NDArray[Any]:
    """What comes back of a sequence."""
    ids = SEQUENCES[name]
    match = store.match(MODEL, ids)
    out = np.zeros(MODEL.shape(len(ids)), MODEL.dtype)
    return out[:, :, :, : store.load(MODEL, match, out)]


def fresh(folder: Path, say: Callable[[str], None]) -> None:
    """The first start on an empty folder: keys and index are made."""
    with open_here(folder) as store:
        _save_all(store, ["first"], say)


def used(folder: Path, say: Callable[[str], None]) -> None:
    """A later start: reads, saves, grows a sequence, moves one down the ladder, forgets, evicts for want of room."""
    with open_here(folder) as store:
        _look(store, "old", say)
        _save_all(store, ["first", "longer"], say)
        _look(store, "first", say)
        with upkeep_of(store, later=3600) as upkeep:
            upkeep.step()
        try:
            store.forget_owners(MODEL.tenant_secret, [OWNERS["doomed"]])
            say("forgotten doomed")
        except (OSError, sqlite3.Error):
            say("kept doomed")
        _save_all(store, ["last"], say)
        _look(store, "last", say)
        store.stats()


SCENARIOS = {"fresh": fresh, "used": used}


@contextmanager
def upkeep_of(store: KVStore, later: float = 0.0) -> Iterator[Upkeep]:
    """The store's upkeep, at a time when everything in it is so many seconds older."""
    assert store._disk is not None
    upkeep = Upkeep(store._disk, store.settings, store.fidelity, Counters(), clock=lambda: time.time() + later)
    yield upkeep
    upkeep.close()


def _look(store: KVStore, name: str, say: Callable[[str], None]) -> None:
    """Notes what came back, for the harness to judge."""
    say(f"restored {name} {restored(store, name).tobytes().hex()}")


def _save_all(store: KVStore, names: list[str], say: Callable[[str], None]) -> None:
    for name in names:
        before = store.stats()
        save(store, name)
        flushed = store.flush(20)
        after = store.stats()
        if flushed and (after.write_errors, after.dropped) == (before.write_errors, before.dropped):
            say(f"saved {name}")


class Listener(logging.Handler):
    """Passes on what was logged with an exception: errors that the code did not expect."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._say("unhandled " + "".join(traceback.format_exception(record.exc_info[1])))


def run(fault: Fault, library: Any) -> None:
    """Runs the scenario in this process, which ends here."""
    log = os.open(fault.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(text: str) -> None:
        os.write(log, (json.dumps(text) + "\n").encode())

    logging.lastResort = None
    logging.getLogger().addHandler(Listener(say))
    threading.excepthook = lambda event: say(f"unhandled {event.exc_type}: {event.exc_value}")
    signal.alarm(HANG_SECONDS)
    code = 1
    try:
        library.syscalls_arm(os.fsencode(fault.folder), fault.at, fault.mode)
        SCENARIOS[fault.scenario](Path(fault.folder), say)
        code = 0
    except BaseException:
        say("unhandled " + traceback.format_exc())
        raise
    finally:
        os._exit(code)


def main() -> None:
    """Serves faults until stdin ends."""
    native.warm()  # what is compiled once is no part of a save
    index_module.WRITE_TIMEOUT = keyring.BUSY_SECONDS = BUSY_SECONDS
    library = ctypes.CDLL(sys.argv[1])
    library.syscalls_name.restype = ctypes.c_char_p
    for line in sys.stdin:
        fault = Fault(**json.loads(line))
        child = os.fork()
        if not child:
            run(fault, library)
        started = time.monotonic()
        _, status = os.waitpid(child, 0)
        calls = library.syscalls_seen()
        answer = {
            "exit": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - started,
            "broken": library.syscalls_broken(),
            "calls": [library.syscalls_name(number).decode() for number in range(calls)],
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
