"""The file of one chunk: fixed header, token ids, payload.

Invariants:
- The checksum covers every byte of the file besides itself: a file that passes is whole and as it was written.
- The header repeats what the file was asked for by (key, parent, identity, tokens, shape, dtype), so that a whole
  file in the wrong place is refused as well.

    offset  bytes
         0      8  magic
         8      4  format version, u32
        12      4  first token's position in its sequence, u32
        16     32  key
        48     32  parent key
        80     32  identity digest
       112     20  shape: layers, 2, kv_heads, tokens, head_dim, u32 each
       132     12  dtype name, ASCII, zero-padded
       144     16  codec name, ASCII, zero-padded
       160      8  payload length, u64
       168     56  zero
       224     32  blake3 of bytes 0..224 and all bytes from 256 on
       256         token ids, u32 each, then the payload
All numbers are little-endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from memory.kv.identity import KV_DTYPES, Ids

MAGIC = b"KVLOOP\r\n"  # the line end shows when a file was transferred as text
FORMAT_VERSION = 1
HEADER_BYTES = 256
CHECKSUM_AT = 224
FIELDS = struct.Struct("<8sII32s32s32s5I12s16sQ56x")
MAX_RAW_BYTES = 1 << 34
"""No chunk is larger; a header that claims more is not believed."""

Shape = tuple[int, int, int, int, int]


class BadChunk(ValueError):
    """The file is not a whole, unchanged chunk, or not the chunk that was asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkHeader:
    """What a chunk file says about itself."""

    key: bytes
    parent: bytes
    identity: bytes
    start: int
    shape: Shape
    dtype: str
    codec: str
    payload_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens in the chunk."""
        return self.shape[3]

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return HEADER_BYTES + 4 * self.tokens + self.payload_bytes


def pack_chunk(header: ChunkHeader, ids: Ids, payload: bytes) -> bytes:
    """The bytes of the chunk's file. Raises `ValueError` where the header does not fit ids or payload."""
    if len(ids) != header.tokens or len(payload) != header.payload_bytes:
        raise ValueError("the header does not describe these ids and this payload")
    fields = FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        header.start,
        header.key,
        header.parent,
        header.identity,
        *header.shape,
        header.dtype.encode("ascii"),
        header.codec.encode("ascii"),
        header.payload_bytes,
    )
    body = ids.astype("<u4", copy=False).tobytes()
    checksum = blake3(fields).update(body).update(payload).digest()
    return b"".join((fields, checksum, body, payload))


def read_header(data: bytes | bytearray | memoryview, file_bytes: int) -> ChunkHeader:
    """The header in the first `HEADER_BYTES` of a file of `file_bytes`; checks form and length, not the checksum.

    Raises `BadChunk` with what is wrong.
    """
    if len(data) < HEADER_BYTES:
        raise BadChunk(f"file of {file_bytes} bytes is shorter than a header")
    magic, version, start, key, parent, identity, *rest = FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise BadChunk("not a chunk file: wrong magic")
    if version != FORMAT_VERSION:
        raise BadChunk(f"format version {version}; this program reads {FORMAT_VERSION}")
    layers, pair, heads, tokens, dim, dtype, codec, payload_bytes = rest
    header = ChunkHeader(
        key, parent, identity, start, (layers, pair, heads, tokens, dim), _text(dtype), _text(codec), payload_bytes
    )
    if header.dtype not in KV_DTYPES:
        raise BadChunk(f"unknown dtype {header.dtype!r}")
    raw_bytes = math.prod(header.shape) * KV_DTYPES[header.dtype].itemsize
    if not 0 < raw_bytes <= MAX_RAW_BYTES or pair != 2 or payload_bytes > 2 * raw_bytes + HEADER_BYTES:
        raise BadChunk(f"impossible shape {header.shape} for a payload of {payload_bytes} bytes")
    if header.file_bytes != file_bytes:
        raise BadChunk(f"file of {file_bytes} bytes; its header says {header.file_bytes}")
    return header


def open_chunk(data: memoryview) -> tuple[ChunkHeader, Ids, memoryview]:
    """Header, token ids and payload of a whole file, the last two as views into `data`; all of it verified.

    Raises `BadChunk` with what is wrong.
    """
    header = read_header(data[:HEADER_BYTES], len(data))
    checksum = blake3(data[:CHECKSUM_AT]).update(data[HEADER_BYTES:]).digest()
    if checksum != data[CHECKSUM_AT:HEADER_BYTES]:
        raise BadChunk("checksum does not match")
    ids_end = HEADER_BYTES + 4 * header.tokens
    return header, np.frombuffer(data[HEADER_BYTES:ids_end], "<u4"), data[ids_end:]


def _text(field: bytes) -> str:
    try:
        return field.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError as error:
        raise BadChunk("a name in the header is not ASCII") from error
