"""One writer at a time in a folder, over processes and threads. The kernel frees the lock of a killed process."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.01


@contextmanager
def folder_lock(path: Path, seconds: float) -> Iterator[None]:
    """Holds the lock file `path`. Raises `OSError`: ETIMEDOUT after `seconds`, or what opening the file gives."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + seconds
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                raise OSError(errno.ETIMEDOUT, f"another process kept the lock for {seconds} s", str(path))
            time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)  # frees the lock


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
