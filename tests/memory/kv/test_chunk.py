"""The chunk file says what it holds, and any change of any bit shows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.kv.chunk import FIELDS, HEADER_BYTES, BadChunk, ChunkHeader, open_chunk, pack_chunk, read_header

HEADER = ChunkHeader(
    key=b"k" * 32,
    parent=b"p" * 32,
    identity=b"i" * 32,
    start=512,
    shape=(3, 2, 2, 5, 8),
    dtype="bfloat16",
    codec="exact",
    payload_bytes=40,
)
IDS = np.arange(5, dtype="<u4")
PAYLOAD = bytes(range(40))
FILE = pack_chunk(HEADER, IDS, PAYLOAD)


def test_what_is_packed_is_read() -> None:
    header, ids, payload = open_chunk(memoryview(FILE))
    assert dataclasses.astuple(header) == dataclasses.astuple(HEADER)
    assert ids.tolist() == IDS.tolist()
    assert bytes(payload) == PAYLOAD
    assert len(FILE) == header.file_bytes
    assert FIELDS.size == 224


def test_every_flipped_bit_is_refused() -> None:
    for at in range(len(FILE) * 8):
        changed = bytearray(FILE)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(BadChunk):
            open_chunk(memoryview(changed))


def test_every_shorter_and_longer_file_is_refused() -> None:
    for length in range(len(FILE)):
        with pytest.raises(BadChunk):
            open_chunk(memoryview(FILE[:length]))
    with pytest.raises(BadChunk):
        open_chunk(memoryview(FILE + b"\0"))


@given(st.binary(max_size=600))
def test_foreign_files_are_refused(data: bytes) -> None:
    with pytest.raises(BadChunk):
        open_chunk(memoryview(data))
    with pytest.raises(BadChunk):
        open_chunk(memoryview(FILE[:8] + data))


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (3, 3, 2, 5, 8)},
        {"shape": (0, 2, 2, 5, 8)},
        {"shape": (2**31, 2, 2**31, 5, 8)},
        {"dtype": "int8"},
        {"payload_bytes": 10_000},
    ],
)
def test_headers_that_claim_the_impossible_are_refused_before_anything_is_allocated(change: dict[str, object]) -> None:
    header = dataclasses.replace(HEADER, **change)  # type: ignore[arg-type]
    data = pack_chunk(header, IDS, bytes(header.payload_bytes))
    with pytest.raises(BadChunk):
        read_header(data[:HEADER_BYTES], len(data))


def test_a_header_must_describe_what_is_packed() -> None:
    with pytest.raises(ValueError):
        pack_chunk(HEADER, IDS[:4], PAYLOAD)
    with pytest.raises(ValueError):
        pack_chunk(HEADER, IDS, PAYLOAD[:-1])
