"""Rows and chunk files for the tests of the index, without a store around them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from memory.kv.chunk import ChunkHeader, body_bytes, pack_chunk
from memory.kv.tiers.index import Row

OWNER = b"owner of the rows"[:16]
NOBODY = bytes(16)
ROOT = blake3(b"root").digest()


def key(number: int) -> bytes:
    """A key like any other."""
    return blake3(b"%d" % number).digest()


def row(number: int, **changes: Any) -> Row:
    """A row of a first chunk, with some fields changed."""
    base = Row(
        key=key(number),
        parent=ROOT,
        start=0,
        tokens=32,
        prefix=bytes(16),
        size=100,
        codec="exact",
        fidelity="exact",
        model=b"m" * 16,
        band="all",
        owner=NOBODY,
        expires=0.0,
        last_used=1000.0 + number,
        raw_bytes=400,
    )
    return replace(base, **changes)


def chunk_file(number: int, payload: int = 50, **changes: Any) -> bytes:
    """The file of a chunk that nobody encrypted."""
    fields: dict[str, Any] = {
        "key": key(number),
        "parent": ROOT,
        "identity": ROOT,
        "model": b"m" * 16,
        "band": "all",
        "start": 0,
        "shape": (3, 2, 2, 32, 8),
        "dtype": "bfloat16",
        "codec": "exact",
        "fidelity": "exact",
        "body_bytes": body_bytes(32, payload, encrypted=False),
        "created": 1000.0 + number,
        "expires": 0.0,
        "owner": NOBODY,
    }
    header = ChunkHeader(**(fields | changes))
    return bytes(pack_chunk(header, bytes(16), np.arange(32, dtype="<u4"), bytes(payload), None))


def write_file(chunks: Path, number: int, data: bytes | None = None) -> Path:
    """Puts a chunk's file where it belongs."""
    name = key(number).hex()
    path = chunks / name[0] / name[1] / f"{name}.kv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(chunk_file(number) if data is None else data)
    return path
