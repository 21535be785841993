"""What the tests of upkeep run in processes of their own: `python -m ... MODE FOLDER [URL]`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.memory.kv.common import open_store
from tests.memory.kv.rungs import Clock, upkeep_of, use_rungs


def active(folder: Path, _: str | None) -> None:
    """Says when it becomes the one that works, and whether it was not at first."""
    with open_store(folder, ram_bytes=0) as store:
        upkeep = upkeep_of(store)
        said = ""
        while True:
            state = "active" if upkeep.step() else "standing by"
            if state != said:
                print(state, flush=True)
            said = state
            time.sleep(0.05)


def work(folder: Path, url: str | None) -> None:
    """Moves chunks down the ladder and out, without end."""
    with open_store(folder, ram_bytes=0, remote_url=url or None) as store:
        used = store.stats().disk.bytes
        tight = store.settings.model_copy(update={"disk_bytes": max(1, used // 2), "high_water": 0.5})
        clock = Clock()
        upkeep = upkeep_of(store, clock, tight)
        print("working", flush=True)
        said = False
        while True:
            clock.ahead += 3600.0
            upkeep.step()
            done = upkeep.stats()
            if not said and done.moved.by_budget + done.moved.by_age + done.offloaded:
                said = True
                print("moved", flush=True)
            time.sleep(0.01)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        use_rungs(patch)
        {"active": active, "work": work}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
