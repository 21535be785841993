"""Every kind of system call on the write path fails, stops half way, or is the last one: nothing wrong ever comes back.

A sample; `python -m benchmarks.memory.faults` tries every call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from tests.faults.syscalls import MODES, Sweep, compiler, is_right, right_chunks
from tests.faults.syscalls_child import CHUNK, FIRST, SCENARIOS, kv_like

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="system calls are broken through LD_PRELOAD, which is Linux's"),
    pytest.mark.skipif(compiler() is None, reason="there is no C compiler to build the library that breaks calls"),
]
OF_EACH = {"fail": 3, "short": 4, "kill": 3, "torn": 4, "full": 1, "dead": 1}


@pytest.fixture(scope="module")
def sweep() -> Iterator[Sweep]:
    with Sweep() as sweep:
        yield sweep


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_broken_call(sweep: Sweep, scenario: str, mode: str) -> None:
    tried = [fault for fault in sweep.sample(OF_EACH[mode]) if fault[:2] == (scenario, mode)]
    outcomes = list(sweep.run(tried))
    bad = [str(outcome) for outcome in outcomes if outcome.unhandled or outcome.wrong]
    assert not bad, "\n".join(bad)
    assert sum(outcome.happened for outcome in outcomes) > len(outcomes) // 2, "threads move calls about a little"


def test_the_calls_of_the_write_path_are_seen(sweep: Sweep) -> None:
    seen = {call.split("(")[0].split(" ")[0].removesuffix("64") for name in SCENARIOS for call in sweep.calls(name)}
    assert {"open", "write", "pwrite", "fsync", "fdatasync", "rename", "unlink", "mkdir", "fcntl", "close"} <= seen


def test_other_kv_is_told_from_the_right_one() -> None:
    kv = kv_like(FIRST)
    assert is_right("first", kv)
    lossy = np.concatenate([right_chunks("first", 0)[-1], kv[:, :, :, CHUNK:]], axis=3)
    assert is_right("first", lossy), "after the ladder"
    kv[1, 0, 0, CHUNK, 3] ^= 1
    assert not is_right("first", kv)
    assert not is_right("first", kv_like(FIRST[1:]))
