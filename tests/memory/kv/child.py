"""What the fault tests run in processes of their own: `python -m tests.memory.kv.child MODE FOLDER NUMBER`.

Every mode ends with exit code 0 only if all that came back was right.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from itertools import count
from pathlib import Path

import numpy as np

from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt, restore

NOBODY = 65534


def write_until_killed(folder: Path, number: int) -> None:
    """Saves sequence after sequence and says which are durable."""
    with open_store(folder, ram_bytes=0, queue_bytes=1 << 22) as store:
        print("open", flush=True)
        for seed in count(number):
            ids = prompt(2 * CHUNK + 9, seed=seed)
            store.save(identity(), ids, kv_of(ids))
            if store.flush(20) and store.stats().write_errors == 0:
                print(seed, flush=True)


def share(folder: Path, number: int) -> None:
    """Saves and restores sequences that the other processes use too, in a folder too small for them."""
    rng = np.random.default_rng(number)
    restored = 0
    with open_store(folder, ram_bytes=0, disk_bytes=100_000) as store:
        for _ in range(60):
            ids = prompt(3 * CHUNK, seed=int(rng.integers(12)))[: int(rng.integers(8, 3 * CHUNK))]
            restored += restore(store, ids)
            store.save(identity(), ids, kv_of(ids))
            assert store.flush(30)
        stats = store.stats()
        assert stats.quarantined == stats.read_errors == stats.write_errors == stats.index_errors == 0, stats
    print(restored, flush=True)


def read_only(folder: Path, number: int) -> None:
    """Reads a folder that it may not write to, as a user that permissions bind."""
    if os.getuid() == 0:
        os.setuid(NOBODY)
    ids, new = prompt(number), prompt(number, seed=1)
    with open_store(folder, ram_bytes=0) as store:
        assert restore(store, ids) == number
        store.save(identity(), new, kv_of(new))
        assert store.flush(20)
        stats = store.stats()
        assert stats.write_errors > 0, stats
        assert stats.disk_trouble
        assert restore(store, new) == 0
        assert restore(store, ids) == number


def file_size_limit(folder: Path, number: int) -> None:
    """Writes where no file may become larger than a few bytes: chunk files and index both fail."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    ids, new = prompt(number), prompt(number, seed=1)
    with open_store(folder) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        assert restore(store, ids) == number
        store.save(identity(), new, kv_of(new))
        assert store.flush(20)
        assert store.stats().write_errors > 0
        assert restore(store, new) == number, "RAM has it"
        assert not list(folder.rglob("*.tmp"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        store.save(identity(), new, kv_of(new))
        assert store.flush(20)
        assert store.stats().disk_trouble == "", "it mends itself"
    with open_store(folder) as store:
        assert restore(store, ids) == restore(store, new) == number


def write_until_forgotten(folder: Path, number: int) -> None:
    """Saves for an owner until nothing more is stored for it; then nothing of it is left, in RAM neither."""
    saved: list[list[int]] = []
    with open_store(folder) as store:
        print("open", flush=True)
        for seed in count(number):
            ids = prompt(2 * CHUNK, seed=seed)
            store.save(identity(), ids, kv_of(ids), owner="session")
            assert store.flush(20)
            saved.append(ids)
            if store.stats().dropped:
                break
            print(seed, flush=True)
        assert [restore(store, ids) for ids in saved] == [0] * len(saved)
        store._ram.clear()
        assert [restore(store, ids) for ids in saved] == [0] * len(saved)
        stats = store.stats()
        assert stats.write_errors == stats.read_errors == stats.index_errors == 0, stats


MODES = {
    "write": write_until_killed,
    "share": share,
    "read-only": read_only,
    "limit": file_size_limit,
    "forgotten": write_until_forgotten,
}

if __name__ == "__main__":
    MODES[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
