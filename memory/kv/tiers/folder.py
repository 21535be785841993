"""The files of the disk tier: one for each chunk, two levels of folders, refused ones apart.

    chunks/a/b/ab12....kv     quarantine/ab12....kv     lock     index.db     keys.db

Invariants:
- A chunk file appears whole or not at all.
- A file is read to its end before anything of it is used; proving it is the caller's.
Methods raise `OSError` as the file system gives it.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from memory.files import sync_folder, write_atomic
from memory.kv.chunk import HEADER_BYTES, BadChunk, Buffer, ChunkHeader, read_head, read_header
from memory.kv.tiers.rebuild import HEAD_BYTES, SUFFIX, key_of_name

INDEX_NAME = "index.db"
KEYS_NAME = "keys.db"


class ChunkFolder:
    """Thread-safe for different keys."""

    def __init__(self, folder: Path, quarantine_bytes: int) -> None:
        self.root = folder
        self.chunks = folder / "chunks"
        self.index = folder / INDEX_NAME
        self.keys = folder / KEYS_NAME
        self._root = str(self.chunks)
        self._quarantine = folder / "quarantine"
        self._quarantine_bytes = quarantine_bytes
        self._threads = threading.local()

    def prepare(self) -> None:
        """Creates the folders. KV reveals what was said, so nobody else may read it."""
        for folder in (self.root, self.chunks, self._quarantine):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, key: bytes) -> Path:
        """Where the chunk's file lies."""
        return Path(self._name(key))

    def _name(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._root}/{name[0]}/{name[1]}/{name}{SUFFIX}"

    def write(self, key: bytes, data: Buffer) -> None:
        """Writes the chunk's file durably, in the place of an older one."""
        path = self.path(key)
        if not path.parent.is_dir():
            for folder in (path.parent.parent, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(path.parent.parent)
            sync_folder(self.chunks)
        write_atomic(path, data, mode=0o600)

    def read(self, key: bytes, accept: Callable[[ChunkHeader], None]) -> memoryview:
        """All bytes of the chunk's file, not proven; valid until this thread reads the next one.

        `accept` is shown the header before the rest is read and raises `BadChunk` to refuse it. Raises `BadChunk`,
        and `FileNotFoundError` where there is no such file.
        """
        descriptor = os.open(self._name(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            head = os.read(descriptor, HEADER_BYTES)
            accept(read_header(head, size))
            data = self.scratch("file", size)
            data[: len(head)] = head
            filled = len(head)
            while filled < size:
                count = os.readv(descriptor, [data[filled:]])
                if not count:
                    raise BadChunk(f"file ended after {filled} of {size} bytes")
                filled += count
        finally:
            os.close(descriptor)
        return data

    def read_head(self, key: bytes) -> tuple[ChunkHeader, bytes]:
        """Header and prefix digests of the chunk's file, proven. Raises as `read`."""
        return _read_head(self._name(key))

    def advise(self, keys: Iterable[bytes]) -> None:
        """Has the kernel start reading these chunks' files; waits for nothing, and a file that is gone is left out."""
        for key in keys:
            try:
                descriptor = os.open(self._name(key), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(descriptor)
            except OSError:
                continue  # whoever reads it will say so

    def scratch(self, name: str, size: int) -> memoryview:
        """`size` bytes that this thread reuses: fresh memory would cost as much as the reading."""
        buffer = getattr(self._threads, name, b"")
        if len(buffer) < size:
            buffer = bytearray(size)
            setattr(self._threads, name, buffer)
        return memoryview(buffer)[:size]

    def delete(self, key: bytes) -> None:
        """Deletes the chunk's file, if there is one."""
        self.path(key).unlink(missing_ok=True)

    def clean(self, key: bytes) -> None:
        """Deletes what killed writers left half-written of a chunk. Only the holder of the folder's lock may."""
        path = self.path(key)
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):
            leftover.unlink(missing_ok=True)

    def clean_all(self) -> None:
        """As `clean`, for all chunks: looks at every file."""
        for leftover in self.chunks.glob("?/?/.*.tmp"):
            leftover.unlink(missing_ok=True)

    def quarantine(self, key: bytes) -> None:
        """Moves the chunk's file aside, and deletes the oldest of those that lie there already."""
        if self._quarantine_bytes == 0:
            self.delete(key)
            return
        self._quarantine.mkdir(mode=0o700, exist_ok=True)
        self.path(key).replace(self._quarantine / f"{key.hex()}{SUFFIX}")
        files = [(entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(self._quarantine)]
        kept = 0
        for _, size, path in sorted(files, reverse=True):
            kept += size
            if kept > self._quarantine_bytes:
                os.unlink(path)

    def forget_refused(self, owners: Collection[bytes]) -> int:
        """Deletes the refused files of these owners, and those that do not tell whose they are; returns how many."""
        gone = 0
        for path in list(self._quarantine.glob("*")):
            if _owner_of(path) in (None, *owners):
                path.unlink(missing_ok=True)
                gone += 1
        return gone

    def sync(self, keys: Iterable[bytes]) -> None:
        """Makes the deletion of these chunks' files last, also through a power cut."""
        folders = {self.path(key).parent for key in keys} | {self._quarantine}
        for folder in folders:
            if folder.is_dir():
                sync_folder(folder)

    def clear(self) -> None:
        """Deletes all files."""
        for folder in (self.chunks, self._quarantine):
            if folder.exists():
                shutil.rmtree(folder)
        self.prepare()

    def free_bytes(self) -> int:
        """Free space of the file system for this user."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize


def _read_head(path: str | Path) -> tuple[ChunkHeader, bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        head = os.read(descriptor, HEAD_BYTES)
        wanted = read_header(head, size).body_at
        if wanted > len(head):
            head += os.pread(descriptor, wanted - len(head), len(head))
    finally:
        os.close(descriptor)
    return read_head(head, size)


def _owner_of(path: Path) -> bytes | None:
    """Whose refused file it is, where its head is whole."""
    if key_of_name(path.name) is None:
        return None
    try:
        return _read_head(path)[0].owner
    except (BadChunk, OSError):
        return None
