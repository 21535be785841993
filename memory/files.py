"""Durable writes. A file written here is whole or absent after a power cut, never half."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomic(path: Path, data: bytes | bytearray | memoryview, *, mode: int = 0o644) -> None:
    """Writes `data` to `path` so that a reader sees the old file or the new one, even after a power cut.

    The bytes go to a temporary file beside it, are synced, renamed over `path`, and the folder is synced.
    Raises `OSError` as the file system gives it; the temporary file is removed then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames and deletions inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
