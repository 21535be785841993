"""Reading the rows of the index from the chunk files: when the index was lost, and for files that it does not list.

Invariants:
- Header and prefix digests of a file are proven by their seal before a row is made of them; bodies are not read.
- What a row says of the last use is when the chunk was stored: a file does not know when it was read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from memory.kv.chunk import BadChunk, ChunkHeader, read_head, read_header
from memory.kv.identity import DIGEST_BYTES
from memory.kv.tiers.index_schema import Row, Tier

SUFFIX = ".kv"
HEAD_BYTES = 4096
"""One read gives header and digests of a chunk of up to 7168 tokens."""
Refuse = Callable[[bytes, Exception], None]


def row_of(header: ChunkHeader, prefix: bytes, size: int, *, tier: Tier = "disk") -> Row:
    """The row of a chunk whose file or object has `size` bytes."""
    return Row(
        key=header.key,
        parent=header.parent,
        start=header.start,
        tokens=header.tokens,
        prefix=prefix,
        size=size,
        codec=header.codec,
        fidelity=header.fidelity,
        model=header.model,
        band=header.band,
        owner=header.owner,
        expires=header.expires,
        last_used=header.created,
        tier=tier,
        raw_bytes=header.raw_bytes,
    )


def key_of_name(name: str) -> bytes | None:
    """The key that a file's name spells, or None for a file that is not ours."""
    stem, dot, suffix = name.partition(".")
    if dot + suffix != SUFFIX or len(stem) != 2 * DIGEST_BYTES:
        return None
    try:
        key = bytes.fromhex(stem)
    except ValueError:
        return None
    return key if key.hex() == stem else None


def scan_rows(chunks: Path, refused: Refuse) -> Iterator[Row]:
    """The rows of all chunk files in the two levels of folders below `chunks`.

    `refused` is told the key of every file that gives none, and why: `BadChunk`, `OldChunk` or `OSError`. It may move
    or delete the file. Raises `OSError` where a folder cannot be listed.
    """
    for folder in shards(chunks):
        yield from scan_shard(folder, refused)


def shards(chunks: Path) -> list[Path]:
    """The folders that hold chunk files, in order. Raises `OSError`."""
    return [inner for outer in _folders(chunks) for inner in _folders(outer)]


def scan_shard(folder: Path, refused: Refuse) -> Iterator[Row]:
    """As `scan_rows`, for one of the `shards`."""
    for name, key in list_shard(folder):
        try:
            row = read_row(f"{folder}/{name}", key)
        except FileNotFoundError:
            continue  # evicted by another process
        except (OSError, BadChunk) as error:
            refused(key, error)
            continue
        yield row


def list_shard(folder: Path) -> list[tuple[str, bytes]]:
    """Name and key of the chunk files that belong into this one of the `shards`."""
    found = []
    prefix = folder.parent.name + folder.name
    with os.scandir(folder) as entries:
        for entry in entries:
            key = key_of_name(entry.name)
            if key is not None and entry.name.startswith(prefix):
                found.append((entry.name, key))
    return found


def read_row(path: Path | str, key: bytes) -> Row:
    """The row of one file. Raises `OSError`, and `BadChunk` or `OldChunk` where it is not the chunk `key`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        head = os.read(descriptor, HEAD_BYTES)
        try:
            header, prefix = read_head(head, size)
        except BadChunk:
            wanted = read_header(head, size).body_at
            if wanted <= len(head):
                raise
            header, prefix = read_head(os.pread(descriptor, wanted, 0), size)
    finally:
        os.close(descriptor)
    if header.key != key:
        raise BadChunk("the file's name is not its key")
    return row_of(header, prefix, size)


def _folders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if len(entry.name) == 1 and entry.is_dir())
