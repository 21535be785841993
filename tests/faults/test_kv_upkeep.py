"""Processes that do upkeep and are killed: another takes over, and nothing is lost or half done."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from memory.kv.tiers.index import Index
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt
from tests.memory.kv.rungs import Clock, rungs_of, trust, upkeep_of, use_rungs

CHILD = "tests.faults.kv_upkeep_child"
CHUNKS, KILLS = 16, 6


def start(mode: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", CHILD, mode, str(folder), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_another_process_takes_over_when_the_active_one_is_killed(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", ram_bytes=0):
        pass
    children = [start("active", tmp_path / "kv")]
    assert children[0].stdout is not None
    assert children[0].stdout.readline() == "active\n"
    children += [start("active", tmp_path / "kv") for _ in range(2)]
    for child in children[1:]:
        assert child.stdout is not None
        assert child.stdout.readline() == "standing by\n"
    children[0].kill()
    children[0].communicate()
    states: list[str] = []
    deadline = time.monotonic() + 60
    while not states and time.monotonic() < deadline:
        states = [line for child in children[1:] if (line := _line(child))]
    assert states == ["active\n"], "one of those that stood by, and no more than one"
    for child in children[1:]:
        child.kill()
        child.communicate()


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], 0.5)
    return child.stdout.readline() if ready else ""


@pytest.mark.parametrize("remote", [False, True])
def test_kill_9_in_the_middle_of_moving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool) -> None:
    """Whatever the moment, every chunk is there afterwards, on whichever rung and tier, and the sums are right."""
    use_rungs(monkeypatch)
    rng = np.random.default_rng(1)
    folder = tmp_path / "kv"
    url = f"file://{tmp_path}/far" if remote else None
    with open_store(folder, ram_bytes=0) as store:
        for seed in range(CHUNKS):
            ids = prompt(CHUNK, seed=seed)
            store.save(identity(), ids, kv_of(ids))
        assert store.flush(60)
        if not remote:  # where no rung is trusted, the remote is all that makes room
            trust(store, "int8")
            trust(store, "int4")
    far = False
    for kill in range(KILLS):
        child = start("work", folder, url or "")
        assert child.stdout is not None
        assert child.stdout.readline() == "working\n"
        if kill == KILLS - 1 and not far and not _codecs(folder) & {"int8", "int4"}:  # else all may have moved by now
            assert child.stdout.readline() == "moved\n"
        time.sleep(float(rng.uniform(0.0, 0.3)))
        child.kill()
        assert not child.communicate()[1]
        far = far or any((tmp_path / "far").rglob("*.kv"))
        with open_store(folder, ram_bytes=0, disk_bytes=1 << 30, remote_url=url) as store:
            upkeep = upkeep_of(store, Clock())
            upkeep.step(scrub_bytes=1 << 30)
            assert upkeep.stats().errors == 0
            for seed in range(CHUNKS):
                assert len(rungs_of(store, prompt(CHUNK, seed=seed))) == 1, seed
            assert store.flush(60), "what came from far away is on disk again"
            stats = store.stats()
            assert stats.quarantined == stats.index_rebuilds == 0
            assert stats.disk.chunks + stats.remote.chunks == CHUNKS
            assert stats.disk.bytes == sum(path.stat().st_size for path in folder.glob("chunks/?/?/*.kv"))
            assert not list(folder.rglob("*.tmp"))
            upkeep.close()
    assert far if remote else _codecs(folder) & {"int8", "int4"}, "some of the work was done"


def _codecs(folder: Path) -> set[str]:
    """Every codec that a chunk on disk is in."""
    index = Index(folder / "index.db")
    codecs = {row.codec for row in index.rows(list(index.keys())).values()}
    index.close()
    return codecs
