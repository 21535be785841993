"""Native code is built once for each machine, by one of many processes, and its absence is a warning and no more."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from memory.native import native_library

needs_compiler = pytest.mark.skipif(
    all(shutil.which(name) is None for name in ("g++", "c++", "clang++")), reason="there is no C++ compiler"
)
WAITS = 120
SOURCE = """
#include "answer.h"
extern "C" int answer() { return ANSWER; }
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library's source with a header; the cache is the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KVLOOP_NATIVE", raising=False)
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "small.cpp").write_text(SOURCE)
    return folder / "small.cpp"


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "kvloop" / "native").glob("*"))


def in_process(source: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a fresh process says: the answer or None on stdout, the log on stderr."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(source)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=WAITS,
    )


PROGRAM = textwrap.dedent("""
    import logging, os, sys
    from pathlib import Path
    from memory.native import native_library
    logging.basicConfig()
    for _ in range(2):  # the second call must not warn again
        library = native_library(Path(sys.argv[1]), os.environ.get("FUNCTIONS", "").split())
    print(library and library.answer())
""")


@needs_compiler
def test_a_source_becomes_a_library_and_stays_one(source: Path, tmp_path: Path) -> None:
    library = native_library(source)
    assert library is not None
    assert library.answer() == 42
    assert native_library(source) is library
    (built,) = cached(tmp_path)
    inode = built.stat().st_ino
    assert in_process(source).stdout == "42\n"
    assert cached(tmp_path)[0].stat().st_ino == inode, "the second process should have found the first one's library"


@needs_compiler
@pytest.mark.parametrize("changed", ["answer.h", "small.cpp"])
def test_a_changed_source_or_header_is_another_library(source: Path, tmp_path: Path, changed: str) -> None:
    assert in_process(source).stdout == "42\n"
    (source.parent / "answer.h").write_text("#define ANSWER 42\n//\n")
    if changed == "small.cpp":
        source.write_text(SOURCE.replace("ANSWER", "43"))
    else:
        (source.parent / "answer.h").write_text("#define ANSWER 43\n")
    assert in_process(source).stdout == "43\n"
    assert len(cached(tmp_path)) == 2


@needs_compiler
def test_many_processes_at_once_build_it_once(source: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    compiler = tmp_path / "compiler"
    real = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    compiler.write_text(f'#!/bin/sh\necho called >> {calls}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(source)],
            env={**os.environ, "CXX": str(compiler)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    assert [process.communicate(timeout=WAITS)[0] for process in processes] == ["42\n"] * 4
    assert calls.read_text() == "called\n"
    assert len(cached(tmp_path)) == 1


@needs_compiler
def test_a_damaged_library_is_built_again(source: Path, tmp_path: Path) -> None:
    assert in_process(source).stdout == "42\n"
    (built,) = cached(tmp_path)
    built.write_bytes(b"\x7fELF and nothing more")
    assert in_process(source).stdout == "42\n"
    assert ctypes.CDLL(str(built)).answer() == 42


@needs_compiler
def test_another_library_under_its_name_is_not_used(source: Path, tmp_path: Path) -> None:
    """A whole library of somebody's, put where this one belongs."""
    assert in_process(source).stdout == "42\n"
    (built,) = cached(tmp_path)
    source.write_text(SOURCE.replace("answer()", "other()"))
    assert in_process(source).returncode != 0, "it has no answer"
    (other,) = set(cached(tmp_path)) - {built}
    other.replace(built)
    source.write_text(SOURCE)
    assert in_process(source, FUNCTIONS="answer").stdout == "None\n"
    assert str(built) in in_process(source, FUNCTIONS="answer").stderr
    built.unlink()
    assert in_process(source, FUNCTIONS="answer").stdout == "42\n"


@needs_compiler
def test_a_cache_that_cannot_be_written_costs_one_warning(source: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "a file, not a folder"
    blocked.write_text("")
    done = in_process(source, XDG_CACHE_HOME=str(blocked))
    assert done.stdout == "42\n"
    assert done.stderr.count("WARNING") == 1
    assert "XDG_CACHE_HOME" in done.stderr


@needs_compiler
def test_a_cache_that_others_may_write_to_is_not_used(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kvloop" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    done = in_process(source)
    assert done.stdout == "42\n"
    assert "others may write" in done.stderr
    assert cached(tmp_path) == []


@needs_compiler
def test_a_source_that_does_not_compile_is_one_warning_with_the_compilers_words(source: Path, tmp_path: Path) -> None:
    source.write_text("this is no C++")
    done = in_process(source)
    assert done.stdout == "None\n"
    assert done.stderr.count("WARNING") == 1
    assert "error" in done.stderr
    assert cached(tmp_path) == []


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "true"])
def test_a_compiler_that_is_missing_or_fails_is_one_warning(source: Path, tmp_path: Path, compiler: str) -> None:
    done = in_process(source, CXX=compiler)
    assert (done.returncode, done.stdout) == (0, "None\n")
    assert done.stderr.count("WARNING") == 1
    assert cached(tmp_path) == []


def test_the_switch_does_without_and_says_nothing(source: Path, tmp_path: Path) -> None:
    done = in_process(source, KVLOOP_NATIVE="0")
    assert (done.stdout, done.stderr) == ("None\n", "")
    assert cached(tmp_path) == []
