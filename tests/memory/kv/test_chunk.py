"""The chunk file says what it holds, and any change of any bit shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from memory.kv.chunk import (
    FIELDS,
    HEADER_BYTES,
    TAG_BYTES,
    BadChunk,
    ChunkHeader,
    NoKey,
    OldChunk,
    body_bytes,
    open_chunk,
    pack_chunk,
    read_head,
    read_header,
    verify_chunk,
)

IDS = np.arange(1000, 1035, dtype="<u4")
PREFIX = bytes(range(16))
PAYLOAD = bytes(range(40))
CIPHER = AESGCM(bytes(32))
PLAIN_HEADER = ChunkHeader(
    key=b"k" * 32,
    parent=b"p" * 32,
    identity=b"i" * 32,
    model=b"m" * 16,
    band="12-30",
    start=512,
    shape=(3, 2, 2, len(IDS), 8),
    dtype="bfloat16",
    codec="exact",
    fidelity="int4",
    body_bytes=body_bytes(len(IDS), len(PAYLOAD), encrypted=False),
    created=1e9,
    expires=2e9,
    owner=b"o" * 16,
)
HEADER = dataclasses.replace(
    PLAIN_HEADER, body_bytes=body_bytes(len(IDS), len(PAYLOAD), encrypted=True), nonce=b"n" * 12, key_id=b"K" * 8
)
FILE = bytes(pack_chunk(HEADER, PREFIX, IDS, PAYLOAD, CIPHER))
PLAIN_FILE = bytes(pack_chunk(PLAIN_HEADER, PREFIX, IDS, PAYLOAD, None))


def open_file(data: bytes | bytearray, cipher: AESGCM | None = CIPHER) -> tuple[ChunkHeader, list[int], bytes]:
    header, ids, payload = open_chunk(memoryview(data), cipher, memoryview(bytearray(len(data))))
    return header, ids.tolist(), bytes(payload)


@pytest.mark.parametrize(("header", "file"), [(HEADER, FILE), (PLAIN_HEADER, PLAIN_FILE)], ids=["encrypted", "plain"])
def test_what_is_packed_is_read(header: ChunkHeader, file: bytes) -> None:
    read, ids, payload = open_file(file)
    assert dataclasses.astuple(read) == dataclasses.astuple(header)
    assert (ids, payload) == (IDS.tolist(), PAYLOAD)
    assert len(file) == header.file_bytes
    assert FIELDS.size + 32 + 8 == HEADER_BYTES
    for proven, prefix in (verify_chunk(memoryview(file)), read_head(file[: header.body_at], len(file))):
        assert (dataclasses.astuple(proven), prefix) == (dataclasses.astuple(header), PREFIX)


def test_nothing_of_the_words_can_be_read_in_an_encrypted_file() -> None:
    assert IDS[:8].tobytes() in PLAIN_FILE
    assert PAYLOAD[:20] in PLAIN_FILE
    assert IDS[:8].tobytes() not in FILE
    assert PAYLOAD[:20] not in FILE


@pytest.mark.parametrize("file", [FILE, PLAIN_FILE], ids=["encrypted", "plain"])
def test_every_flipped_bit_is_refused_by_reader_and_scrubber(file: bytes) -> None:
    for at in range(len(file) * 8):
        changed = bytearray(file)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(BadChunk):
            open_file(changed)
        with pytest.raises(BadChunk):
            verify_chunk(memoryview(changed))


def test_a_flipped_bit_of_header_or_digests_shows_without_the_body() -> None:
    for at in range(HEADER.body_at * 8):
        changed = bytearray(FILE[: HEADER.body_at])
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(BadChunk):
            read_head(changed, len(FILE))


@pytest.mark.parametrize("file", [FILE, PLAIN_FILE], ids=["encrypted", "plain"])
def test_every_shorter_and_longer_file_is_refused(file: bytes) -> None:
    for length in range(len(file)):
        with pytest.raises(BadChunk):
            open_file(file[:length])
    with pytest.raises(BadChunk):
        open_file(file + b"\0")


@given(st.binary(max_size=1200))
def test_foreign_files_are_refused(data: bytes) -> None:
    for foreign in (data, FILE[:8] + data, FILE[:12] + data):
        with pytest.raises(BadChunk):
            open_file(foreign)


@pytest.mark.parametrize(
    "change",
    [
        {"start": 768},
        {"key": b"K" * 32},
        {"parent": b"P" * 32},
        {"identity": b"I" * 32},
        {"model": b"M" * 16},
        {"band": "all"},
        {"shape": (2, 2, 3, len(IDS), 8)},
        {"dtype": "float16"},
        {"codec": "int8"},
        {"fidelity": "exact"},
        {"created": 1.5e9},
        {"expires": 0.0},
        {"owner": b"O" * 16},
        {"key_id": bytes(8)},
    ],
)
def test_a_body_under_another_header_is_refused(change: dict[str, object]) -> None:
    """Both are whole and of one key, but the body was written for another header: an expiry cannot be put off."""
    other = dataclasses.replace(HEADER, **change)  # type: ignore[arg-type]
    moved = bytearray(pack_chunk(other, PREFIX, IDS, PAYLOAD, CIPHER))
    moved[HEADER.body_at :] = FILE[HEADER.body_at :]
    with pytest.raises(BadChunk, match="decrypt"):
        open_file(moved)
    digests = bytearray(pack_chunk(HEADER, PREFIX[::-1], IDS, PAYLOAD, CIPHER))
    digests[HEADER.body_at :] = FILE[HEADER.body_at :]
    with pytest.raises(BadChunk, match="decrypt"):
        open_file(digests)


def test_another_key_is_refused_and_none_is_told_apart() -> None:
    with pytest.raises(BadChunk, match="another key"):
        open_file(FILE, AESGCM(bytes([1]) * 32))
    with pytest.raises(NoKey):
        open_file(FILE, None)
    changed = bytearray(FILE)
    changed[240] ^= 1
    with pytest.raises(BadChunk, match="header"):
        open_file(changed, None)


@pytest.mark.parametrize("length", [256, 300, 5000])
def test_a_file_of_the_earlier_format_is_old_and_not_bad(length: int) -> None:
    data = (FILE[:8] + (1).to_bytes(4, "little") + bytes(5000))[:length]
    with pytest.raises(OldChunk):
        read_header(data, length)
    with pytest.raises(OldChunk):
        open_file(data)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (3, 3, 2, len(IDS), 8)},
        {"shape": (0, 2, 2, len(IDS), 8)},
        {"shape": (2**31, 2, 2**31, len(IDS), 8)},
        {"dtype": "int8"},
        {"fidelity": "perfect"},
        {"created": float("nan")},
        {"expires": float("inf")},
    ],
)
def test_headers_that_claim_the_impossible_are_refused(change: dict[str, object]) -> None:
    data = pack_chunk(dataclasses.replace(HEADER, **change), PREFIX, IDS, PAYLOAD, CIPHER)  # type: ignore[arg-type]
    with pytest.raises(BadChunk):
        read_header(data[:HEADER_BYTES], len(data))


def test_a_payload_far_larger_than_the_array_is_refused() -> None:
    payload = bytes(PLAIN_HEADER.raw_bytes * 2 + HEADER_BYTES + 1)
    header = dataclasses.replace(PLAIN_HEADER, body_bytes=body_bytes(len(IDS), len(payload), encrypted=False))
    with pytest.raises(BadChunk, match="payload"):
        open_file(pack_chunk(header, PREFIX, IDS, payload, None))


@pytest.mark.parametrize(
    "pack",
    [
        lambda: pack_chunk(HEADER, PREFIX, IDS[:4], PAYLOAD, CIPHER),
        lambda: pack_chunk(HEADER, PREFIX, IDS, PAYLOAD[:-1], CIPHER),
        lambda: pack_chunk(HEADER, PREFIX[:8], IDS, PAYLOAD, CIPHER),
        lambda: pack_chunk(HEADER, PREFIX, IDS, PAYLOAD, None),
        lambda: pack_chunk(PLAIN_HEADER, PREFIX, IDS, PAYLOAD, CIPHER),
    ],
)
def test_a_header_must_describe_what_is_packed(pack: Callable[[], bytearray]) -> None:
    with pytest.raises(ValueError):
        pack()


def test_an_expired_chunk_says_so() -> None:
    assert not HEADER.expired(1.9e9)
    assert HEADER.expired(2e9)
    assert not dataclasses.replace(HEADER, expires=0.0).expired(9e9)
    assert HEADER.payload_bytes == len(PAYLOAD) == HEADER.body_bytes - TAG_BYTES - 4 * len(IDS)
