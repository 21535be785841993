"""The native code reads and writes nothing outside its buffers, whatever the payload: proven by the sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fuzz_codec.cpp")
BUILD = ["-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fsanitize=address,undefined"]
ARRAYS = 4000


@pytest.mark.slow
def test_damaged_payloads_touch_nothing_outside_their_buffers(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path / "fuzz"
    build = [compiler, *BUILD, "-fno-sanitize-recover=undefined", "-o", str(program), str(SOURCE)]
    built = subprocess.run(build, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    for seed in ("1", "2"):
        done = subprocess.run([str(program), seed, str(ARRAYS)], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-3000:]
