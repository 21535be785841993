"""Compiles one C++ file to a shared library, once for each machine, and loads it.

Invariants:
- A library in the cache is whole: it is written under another name, synced and renamed. Its name is the digest of all
  it depends on: source, headers beside it, flags, compiler, processor. So a home that moves to another machine builds
  anew instead of dying of an unknown instruction, and two versions of this program do not meet.
- Many processes may ask at once: one compiles, the others wait for it.
- Nothing here fails its caller: without a library the caller gets None, the log one warning, and the caller's Python
  does the work. `KVLOOP_NATIVE=0` asks for just that.
- Only what this user wrote is loaded: a cache folder that others may write to is not used.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from memory.files import write_atomic

logger = logging.getLogger(__name__)

FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    # The bits of results are part of file formats: no fused multiply-add, no reordering. The other two only let the
    # compiler vectorise rounding; they change no result.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
COMPILERS = ("g++", "c++", "clang++")
COMPILE_SECONDS = 300
SWITCH = "KVLOOP_NATIVE"


class NativeError(RuntimeError):
    """There is no library: no compiler, or one that failed. Says what to do."""


_lock = threading.Lock()
_libraries: dict[Path, ctypes.CDLL | None] = {}


def switched_off() -> bool:
    """Whether the environment asks to do without native code."""
    return os.environ.get(SWITCH) == "0"


def native_library(source: Path, functions: Sequence[str] = ()) -> ctypes.CDLL | None:
    """The library of a C++ file, compiled if need be; None, after one warning, where that is not possible.

    `functions` are looked for in it: a file in the cache may be another library under this one's name.
    Compiling takes seconds, once for each machine; loading takes a millisecond. Calls release the GIL.
    """
    if switched_off():
        return None
    source = source.resolve()
    with _lock:
        if source not in _libraries:
            try:
                _libraries[source] = _with(functions, _load(source))
            except (NativeError, OSError) as error:
                logger.warning("%s runs as Python, several times slower: %s", source.name, error)
                _libraries[source] = None
        return _libraries[source]


def _with(functions: Sequence[str], library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, which has these functions. Another cannot take its place in this process: it is loaded."""
    missing = [name for name in functions if not hasattr(library, name)]
    if missing:
        raise NativeError(f"{library._name} has no {', '.join(missing)}: delete it, and it is built again")
    return library


def _load(source: Path) -> ctypes.CDLL:
    compiler = _compiler()
    name = f"{source.stem}-{_digest(source, compiler)}.so"
    try:
        folder = _cache_folder()
        library = _cached(folder / name)
        if library is not None:
            return library
        with _only_one(folder):
            # Another process may have built it meanwhile.
            library = _cached(folder / name)
            if library is not None:
                return library
            write_atomic(folder / name, _compile(source, compiler), mode=0o700)
            return ctypes.CDLL(str(folder / name))
    except OSError as error:
        logger.warning(
            "%s is compiled by each process anew, since it cannot be cached (%s): set XDG_CACHE_HOME to a folder of "
            "this user that can be written to",
            source.name,
            error,
        )
    with tempfile.TemporaryDirectory(prefix="kvloop-native-") as private:
        path = Path(private, name)
        path.write_bytes(_compile(source, compiler))
        return ctypes.CDLL(str(path))


def _cached(path: Path) -> ctypes.CDLL | None:
    """The library at `path`; None where there is none, or none that loads, and one has to be built."""
    if not path.exists():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        logger.info("%s does not load and is built again: %s", path, error)
        return None


def _cache_folder() -> Path:
    """The folder of this user's libraries. Raises `OSError` where it cannot be made or others may write to it."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(root):
        raise FileNotFoundError("this user has no home folder")
    folder = Path(root) / "kvloop" / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to another user, or others may write to it")
    return folder


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise NativeError(
        f"there is no C++ compiler: install g++ or clang++, or name one in CXX (looked for {named or COMPILERS})"
    )


def _digest(source: Path, compiler: str) -> str:
    """Covers all that the library depends on."""
    digest = blake3()
    for path in [source, *sorted(source.parent.glob("*.h"))]:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode()).update(content)
    real = Path(compiler).resolve()
    status = real.stat()
    digest.update(repr((FLAGS, str(real), status.st_size, status.st_mtime_ns, _processor())).encode())
    return digest.hexdigest(16)


def _processor() -> str:
    """What `-march=native` looks at: the processor's model and what it can do."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
        facts = [line for line in lines if line.split("\t", 1)[0].strip(" :") in _CPU_FACTS]
        if facts:
            return "\n".join(facts)
    return f"{platform.machine()} {platform.processor()}"


_CPU_FACTS = {
    "vendor_id", "cpu family", "model", "stepping", "flags",  # x86
    "CPU implementer", "CPU part", "CPU variant", "Features",  # Arm
}  # fmt: skip


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which the system releases when its holder dies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(source: Path, compiler: str) -> bytes:
    """The bytes of the library. Raises `NativeError` with the compiler's first words."""
    with tempfile.TemporaryDirectory(prefix="kvloop-native-") as private:
        target = Path(private, "library.so")
        command = [compiler, *FLAGS, "-o", str(target), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeError(f"{compiler} could not be run: {error}") from error
        if done.returncode:
            words = (done.stderr.strip() or "it said nothing").splitlines()
            raise NativeError(f"{compiler} failed with status {done.returncode}: {' '.join(words[:3])[:400]}")
        try:
            return target.read_bytes()
        except OSError as error:
            raise NativeError(f"{compiler} wrote no library") from error
