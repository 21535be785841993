"""Breaks every system call of the write path in turn, and looks at what a clean process finds afterwards.

`Sweep` builds `syscalls.c` with the system's compiler, starts `syscalls_child` under it, and for each fault copies a
prepared folder, lets the child work on it, and opens what is left. The tests try a sample, the benchmark all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory.kv.codec.factory import codec_named
from memory.kv.tiers.base import kept_of
from tests.faults.syscalls_child import (
    BUDGET,
    CHUNK,
    MODEL,
    OWNERS,
    SCENARIOS,
    SEQUENCES,
    Fault,
    kv_like,
    open_here,
    prepare,
    restored,
    upkeep_of,
)

SOURCE = Path(__file__).with_name("syscalls.c")
ROOT = Path(__file__).resolve().parents[2]
MODES = {"fail": 1, "short": 2, "kill": 3, "torn": 4, "full": 5, "dead": 6}
"""Fail once; write half once; die after the call; die in the middle of a write; no room from here on; nothing works
from here on. The values are those of `syscalls.c`."""
WRITES = ("write", "pwrite", "writev")
LOCKS = ("fcntl", "flock")


def compiler() -> str | None:
    """A C compiler of this system."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


@dataclass
class Outcome:
    """One fault and what came of it; lists of what went wrong, in words."""

    scenario: str
    mode: str
    at: int
    call: str = ""
    happened: bool = False
    unhandled: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.scenario}: call {self.at} ({self.call}), {self.mode}: {self.unhandled + self.wrong}"


class Sweep:
    """Use with `with`. Works in memory where it can: broken calls need no real disk, and syncing one takes long."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        self._scratch = tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)
        self._folder = folder = Path(self._scratch.name)
        self._library = folder / "syscalls.so"
        self._templates = {name: folder / f"template-{name}" for name in SCENARIOS}
        self._calls: dict[str, list[str]] = {}

    def __enter__(self) -> Sweep:
        cc = compiler()
        if cc is None:
            raise RuntimeError("no C compiler: install gcc or clang to break system calls")
        build = [cc, "-O1", "-shared", "-fPIC", "-o", str(self._library), str(SOURCE), "-ldl"]
        subprocess.run(build, check=True, capture_output=True)
        self._templates["fresh"].mkdir()
        prepare(self._templates["used"])
        self._child = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.faults.syscalls_child", str(self._library)],
            env=os.environ | {"LD_PRELOAD": str(self._library), "OPENBLAS_NUM_THREADS": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for scenario in SCENARIOS:
            outcome, calls = self._run(scenario, "fail", 0)
            assert not outcome.unhandled + outcome.wrong, outcome
            self._calls[scenario] = calls
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._child:
            assert self._child.stdin is not None
            self._child.stdin.close()
        self._scratch.cleanup()

    def calls(self, scenario: str) -> list[str]:
        """The calls that the scenario makes when nothing is broken."""
        return self._calls[scenario]

    def faults(self) -> list[tuple[str, str, int]]:
        """Every scenario, mode and call that makes a difference: half a call is for writes, and a process that dies
        after it took a lock leaves what it left before."""
        return [
            (scenario, mode, at)
            for scenario, calls in self._calls.items()
            for mode in MODES
            for at, call in enumerate(calls, 1)
            if (mode not in ("short", "torn") or call.startswith(WRITES))
            and (mode == "fail" or not call.startswith(LOCKS))
        ]

    def sample(self, of_each: int) -> list[tuple[str, str, int]]:
        """Up to so many faults of each scenario, mode and name of call, spread over the scenario."""
        groups: dict[tuple[str, str, str], list[tuple[str, str, int]]] = {}
        for scenario, mode, at in self.faults():
            name = self._calls[scenario][at - 1].split(" ")[0]
            groups.setdefault((scenario, mode, name), []).append((scenario, mode, at))
        return [
            group[(2 * number + 1) * len(group) // (2 * of_each)]
            for group in groups.values()
            for number in range(of_each)
            if len(group) > number
        ]

    def run(self, faults: list[tuple[str, str, int]]) -> Iterator[Outcome]:
        """Tries each fault."""
        for scenario, mode, at in faults:
            yield self._run(scenario, mode, at)[0]

    def _run(self, scenario: str, mode: str, at: int) -> tuple[Outcome, list[str]]:
        folder, log = self._folder / "kv", self._folder / "log"
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink(missing_ok=True)
        shutil.copytree(self._templates[scenario], folder)
        fault = Fault(scenario, str(folder), str(log), at, MODES[mode])
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(asdict(fault)) + "\n")
        self._child.stdin.flush()
        answer = json.loads(self._child.stdout.readline())
        said = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        calls: list[str] = answer["calls"]
        outcome = Outcome(scenario, mode, at, calls[at - 1] if 0 < at <= len(calls) else "", answer["broken"] > 0)
        outcome.unhandled += [line for line in said if line.startswith("unhandled")]
        killed = mode in ("kill", "torn") and outcome.happened
        if answer["exit"] != (-9 if killed else 0) and not outcome.unhandled:
            outcome.unhandled.append(f"the process ended with {answer['exit']}")
        inspect(folder, said, outcome)
        return outcome, calls


@cache
def right_chunks(name: str, start: int) -> list[NDArray[Any]]:
    """What may come back of the chunk at `start`: its KV, or that after the ladder, whatever followed it then."""
    ids = SEQUENCES[name]
    kv = np.ascontiguousarray(kv_like(ids)[:, :, :, start : start + CHUNK])
    found = [kv]
    for followed_by in {0, CHUNK, *(len(other) % CHUNK for other in SEQUENCES.values())}:
        codec = codec_named("int8")
        lossy = np.empty_like(kv)
        codec.decode(memoryview(codec.encode(kv, kept_of(start, followed_by), start)), lossy, start)
        found.append(lossy)
    return found


def is_right(name: str, kv: NDArray[Any]) -> bool:
    """Whether all that was restored is what was saved, or as the rung that it was moved to makes it."""
    for start in range(0, kv.shape[3], CHUNK):
        part = kv[:, :, :, start : start + CHUNK]
        if not any(np.array_equal(part, one[:, :, :, : part.shape[3]]) for one in right_chunks(name, start)):
            return False
    return True


def inspect(folder: Path, said: list[str], outcome: Outcome) -> None:
    """Opens what the faults left, as a later process does, and notes what is not as it must be."""
    for line in said:
        if line.startswith("restored"):
            _, name, data = line.split(" ")
            seen = np.frombuffer(bytes.fromhex(data), MODEL.dtype).reshape(*MODEL.shape(0)[:3], -1, MODEL.head_dim)
            if not is_right(name, seen):
                outcome.wrong.append(f"{name}: other KV than was saved, while it ran")
    with open_here(folder) as store:
        for name in SEQUENCES:
            kv = restored(store, name)
            if not is_right(name, kv):
                outcome.wrong.append(f"{name}: other KV than was saved")
            if f"forgotten {name}" in said and kv.size:
                outcome.wrong.append(f"{name}: forgotten, yet {kv.shape[3]} tokens came")
        with upkeep_of(store) as upkeep:
            upkeep.step(scrub_bytes=1 << 20)
        sizes = [path.stat().st_size for path in folder.glob("chunks/*/*/*")]
        stats = store.stats()
        if sum(sizes) > BUDGET:
            outcome.wrong.append(f"{sum(sizes)} bytes on disk, the budget is {BUDGET}")
        if stats.disk.bytes < sum(sizes) or stats.disk.chunks < len(sizes):  # too many is safe: a file is struck first
            outcome.wrong.append(f"{len(sizes)} files of {sum(sizes)} bytes on disk, counted as {stats.disk}")
        if stats.quarantined:
            outcome.wrong.append(f"{stats.quarantined} files had to be refused")
        store.forget_owners(MODEL.tenant_secret, [OWNERS["doomed"]])
        if restored(store, "doomed").size:
            outcome.wrong.append("forgotten in the end, yet found")
