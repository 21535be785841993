"""Processes that are killed while they write, and processes that share a folder."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from memory.kv.forget import Forgotten
from memory.kv.tiers.lock import folder_lock
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt, restore


def start(mode: str, folder: Path, number: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.memory.kv.child", mode, str(folder), str(number)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def files_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("chunks/?/?/*.kv"))


def test_kill_9_in_the_middle_of_writes(tmp_path: Path) -> None:
    """Whatever was durable before the kill is there after it, and nothing half is ever taken for whole."""
    rng = np.random.default_rng(0)
    durable: list[int] = []
    for kill in range(12):
        with start("write", tmp_path, 1000 * kill) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "open\n"
            durable += [int(child.stdout.readline()) for _ in range(int(rng.integers(4)))]
            time.sleep(float(rng.uniform(0.0, 0.02)))
            child.kill()
            durable += [int(line) for line in child.stdout.read().split()]
        with open_store(tmp_path, ram_bytes=0) as store:
            stats = store.stats()
            assert stats.quarantined == stats.index_rebuilds == 0
            assert stats.disk.bytes == files_bytes(tmp_path)
            assert not list(tmp_path.rglob("*.tmp"))
            for seed in durable[-20:]:
                assert restore(store, prompt(2 * CHUNK + 9, seed=seed)) == 2 * CHUNK + 9
            for seed in range(1000 * kill, 1000 * kill + 50):
                restore(store, prompt(2 * CHUNK + 9, seed=seed))
    assert len(durable) >= 12


def test_processes_share_a_folder_that_is_too_small(tmp_path: Path) -> None:
    children = [start("share", tmp_path, number) for number in range(3)]
    largest = 0
    while any(child.poll() is None for child in children):
        with folder_lock(tmp_path / "lock", 30):
            largest = max(largest, files_bytes(tmp_path))
        time.sleep(0.02)
    outputs = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], outputs
    assert sum(int(out) for out, _ in outputs) > 0, "something was restored"
    assert 0 < largest <= 100_000
    with open_store(tmp_path, disk_bytes=100_000) as store:
        assert store.stats().disk.bytes == files_bytes(tmp_path)


def test_a_process_that_holds_the_lock_delays_nobody_for_long(tmp_path: Path) -> None:
    """As when a writer is stopped by a debugger, or hangs on a dead disk."""
    code = (
        "import sys; from pathlib import Path; from memory.kv.tiers.lock import folder_lock\n"
        "with folder_lock(Path(sys.argv[1]), 5): print('held', flush=True); sys.stdin.read()"
    )
    ids = prompt(2 * CHUNK)
    with open_store(tmp_path) as store:
        store.save(identity(), ids, kv_of(ids))
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with open_store(tmp_path, ram_bytes=0, lock_seconds=0.1) as store:
            assert restore(store, ids) == 2 * CHUNK
            new = prompt(CHUNK, seed=1)
            store.save(identity(), new, kv_of(new))
            assert store.flush(20)
            assert store.stats().write_errors > 0
            holder.kill()
            holder.wait()
            store.save(identity(), new, kv_of(new))
            assert store.flush(20)
            assert restore(store, new) == CHUNK


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_tenants_in_two_processes_never_meet(tmp_path: Path, order: tuple[int, int]) -> None:
    ids = prompt(2 * CHUNK)
    tenants = [identity(tenant_secret=f"tenant {number}") for number in range(2)]
    with open_store(tmp_path) as first, open_store(tmp_path) as second:
        one, two = tenants[order[0]], tenants[order[1]]
        first.save(one, ids, kv_of(ids))
        assert first.flush(20)
        assert second.match(one, ids).tokens == 2 * CHUNK
        assert second.match(two, ids).tokens == 0


def test_an_owner_is_forgotten_while_other_processes_store_for_it(tmp_path: Path) -> None:
    children = [start("forgotten", tmp_path, 1000 * number) for number in range(2)]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "open\n"
            assert all(child.stdout.readline() for _ in range(3)), "it has stored three sequences"
        with open_store(tmp_path, ram_bytes=0) as store:
            gone = store.forget_owners("secret", ["session"])
            assert gone.keys == 1
            assert gone.disk > 0
            for child in children:
                out, error = child.communicate(timeout=60)
                assert child.returncode == 0, (out, error)
            assert not list(tmp_path.glob("chunks/?/?/*.kv")), "nothing was written after the deletion"
            assert store.forget_owners("secret", ["session"]) == Forgotten()
    finally:
        for child in children:
            child.kill()
            child.communicate()
