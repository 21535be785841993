"""The files of the disk tier: one for each chunk, two levels of folders, refused ones apart.

    chunks/a/b/ab12....kv     quarantine/ab12....kv     lock     index.db

Invariants:
- A chunk file appears whole or not at all.
- A file is read to the end, and its checksum proven, before anything of it is used.
Methods raise `OSError` as the file system gives it.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memory.files import sync_folder, write_atomic
from memory.kv.chunk import HEADER_BYTES, BadChunk, ChunkHeader, open_chunk, read_header
from memory.kv.identity import DIGEST_BYTES, Ids

SUFFIX = ".kv"


@dataclass(frozen=True, slots=True)
class Entry:
    """A chunk file found by scanning."""

    key: bytes
    path: Path
    size: int
    modified: float


class ChunkFolder:
    """Thread-safe for different keys."""

    def __init__(self, folder: Path, quarantine_bytes: int) -> None:
        self.root = folder
        self._chunks = folder / "chunks"
        self._quarantine = folder / "quarantine"
        self._quarantine_bytes = quarantine_bytes
        self._threads = threading.local()

    def prepare(self) -> None:
        """Creates the folders. KV reveals what was said, so nobody else may read it."""
        for folder in (self.root, self._chunks, self._quarantine):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, key: bytes) -> Path:
        """Where the chunk's file lies."""
        name = key.hex()
        return self._chunks / name[0] / name[1] / f"{name}{SUFFIX}"

    def write(self, key: bytes, data: bytes) -> None:
        """Writes the chunk's file durably."""
        path = self.path(key)
        if not path.parent.is_dir():
            for folder in (path.parent.parent, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(path.parent.parent)
            sync_folder(self._chunks)
        write_atomic(path, data, mode=0o600)

    def read(self, key: bytes, accept: Callable[[ChunkHeader], None]) -> tuple[ChunkHeader, Ids, memoryview]:
        """Header, ids and payload of the chunk's file, proven whole; valid until this thread reads the next one.

        `accept` is shown the header before the rest is read and raises `BadChunk` to refuse it. Raises `BadChunk`,
        and `FileNotFoundError` where there is no such file.
        """
        with open(self.path(key), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEADER_BYTES)
            accept(read_header(head, size))
            data = self._buffer(size)
            data[: len(head)] = head
            filled = len(head)
            while filled < size:
                count = file.readinto(data[filled:])
                if not count:
                    raise BadChunk(f"file ended after {filled} of {size} bytes")
                filled += count
        return open_chunk(data)

    def _buffer(self, size: int) -> memoryview:
        """`size` bytes that this thread reuses: fresh memory would cost as much as the reading."""
        if len(getattr(self._threads, "buffer", b"")) < size:
            self._threads.buffer = bytearray(size)
        return memoryview(self._threads.buffer)[:size]

    def describe(self, entry: Entry) -> tuple[ChunkHeader, Ids]:
        """Header and ids of a scanned file, by form and length only. Raises `BadChunk`."""
        with open(entry.path, "rb", buffering=0) as file:
            header = read_header(file.read(HEADER_BYTES), entry.size)
            ids = file.read(4 * header.tokens)
        if header.key != entry.key or len(ids) != 4 * header.tokens:
            raise BadChunk("the file's name is not its key")
        return header, np.frombuffer(ids, "<u4")

    def delete(self, key: bytes) -> None:
        """Deletes the chunk's file, if there is one."""
        self.path(key).unlink(missing_ok=True)

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

    def forget(self, key: bytes) -> None:
        """Deletes the chunk's file wherever it lies."""
        self.delete(key)
        (self._quarantine / f"{key.hex()}{SUFFIX}").unlink(missing_ok=True)

    def sync(self, keys: Iterable[bytes]) -> None:
        """Makes the deletion of these chunks' files last, also through a power cut."""
        folders = {self.path(key).parent for key in keys} | {self._quarantine}
        for folder in folders:
            if folder.is_dir():
                sync_folder(folder)

    def empty_quarantine(self) -> int:
        """Deletes all refused files; returns how many there were."""
        files = [path for path in self._quarantine.glob("*") if path.is_file()]
        for path in files:
            path.unlink(missing_ok=True)
        return len(files)

    def clear(self) -> None:
        """Deletes all files."""
        for folder in (self._chunks, self._quarantine):
            if folder.exists():
                shutil.rmtree(folder)
        self.prepare()

    def scan(self, *, clean: bool) -> Iterator[Entry]:
        """All chunk files. `clean` deletes what killed writers left: only the holder of the lock may ask for it."""
        for path in self._chunks.glob("?/?/*"):
            if clean and path.name.startswith(".") and path.name.endswith(".tmp"):
                path.unlink(missing_ok=True)
                continue
            key = _key_of_name(path.name)
            if key is not None and path == self.path(key):
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue  # evicted by another process
                yield Entry(key, path, status.st_size, status.st_mtime)

    def free_bytes(self) -> int:
        """Free space of the file system for this user."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize


def _key_of_name(name: str) -> bytes | None:
    """The key that a file's name spells, or None for a file that is not ours."""
    stem, dot, suffix = name.partition(".")
    if dot + suffix != SUFFIX or len(stem) != 2 * DIGEST_BYTES:
        return None
    try:
        return bytes.fromhex(stem)
    except ValueError:
        return None
