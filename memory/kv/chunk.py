"""The file of one chunk: fixed header, prefix digests, body. Token ids lie in the body, which is encrypted.

Invariants:
- The checksum covers every byte of the file besides itself and the seal: a file that passes is whole and as it was
  written. The seal covers the header, the checksum included, and the prefix digests, so that these can be believed
  without reading the body.
- Where the file is encrypted, header and digests are authenticated along with the body: a body that decrypts proves
  the very bytes that the checksum would, and its pass is left out. Nothing decrypted is used before it is proven.
- The header repeats what the file was asked for by (key, parent, identity, tokens, shape, dtype), so that a whole
  file in the wrong place is refused as well.

    offset  bytes
         0      8  magic
         8      4  format version, u32
        12      4  first token's position in its sequence, u32
        16     32  key
        48     32  parent key
        80     32  identity digest
       112     16  model digest
       128     16  band, ASCII, zero-padded
       144     20  shape: layers, 2, kv_heads, tokens, head_dim, u32 each
       164     12  dtype name, ASCII, zero-padded
       176     16  codec name, ASCII, zero-padded
       192     16  fidelity, ASCII, zero-padded
       208      8  body length, u64
       216      8  time of storing, seconds since the epoch, f64
       224      8  time of expiry, f64; 0: never
       232     16  owner id
       248     12  nonce; zeros: the body is not encrypted
       260      8  id of the key that it is encrypted with
       268    204  zero
       472     32  checksum: blake3 of bytes 0..472 and all bytes from 512 on
       504      8  seal: blake3 of bytes 0..504 and the prefix digests, its first 8 bytes
       512         prefix digests, 8 bytes for each full 16 tokens
                   body: token ids, u32 each, then the payload; AES-256-GCM with bytes 0..472 and the prefix digests as
                   associated data, its tag of 16 bytes last
All numbers are little-endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from blake3 import blake3
from cryptography.exceptions import InvalidTag

from memory.kv.fidelity import RUNGS, Fidelity, fidelity_named
from memory.kv.identity import KV_DTYPES, PREFIX_BYTES, PREFIX_TOKENS, Ids

MAGIC = b"KVLOOP\r\n"  # the line end shows when a file was transferred as text
FORMAT_VERSION = 2
HEADER_BYTES = 512
CHECKSUM_AT, SEAL_AT = 472, 504
TAG_BYTES = 16
NONCE_BYTES = 12
PLAIN = bytes(NONCE_BYTES)
NO_KEY = bytes(8)
FIELDS = struct.Struct("<8sII32s32s32s16s16s5I12s16s16sQdd16s12s8s204x")
MAX_RAW_BYTES = 1 << 34
"""No chunk is larger; a header that claims more is not believed."""

Shape = tuple[int, int, int, int, int]
Buffer = bytes | bytearray | memoryview


class BadChunk(ValueError):
    """The file is not a whole, unchanged chunk, or not the chunk that was asked for."""


class OldChunk(BadChunk):
    """The file is a chunk of an earlier format: not bad, only of no use any more."""


class NoKey(Exception):
    """The file's owner has no key here: it was destroyed, or the keyring is another one."""


class Cipher(Protocol):
    """AES-256-GCM under one key. `encrypt_into` appends the tag, `decrypt_into` raises `InvalidTag`."""

    def encrypt_into(self, nonce: Buffer, data: Buffer, associated_data: Buffer | None, buf: Buffer) -> int:
        """Writes ciphertext and tag into `buf`, which is exactly as long; returns that length."""

    def decrypt_into(self, nonce: Buffer, data: Buffer, associated_data: Buffer | None, buf: Buffer) -> int:
        """Writes the plaintext into `buf`, which is exactly as long; returns that length."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkHeader:
    """What a chunk file says about itself."""

    key: bytes
    parent: bytes
    identity: bytes
    model: bytes
    band: str
    start: int
    shape: Shape
    dtype: str
    codec: str
    fidelity: Fidelity
    body_bytes: int
    created: float
    expires: float
    owner: bytes
    nonce: bytes = PLAIN
    key_id: bytes = NO_KEY

    @property
    def tokens(self) -> int:
        """Tokens in the chunk."""
        return self.shape[3]

    @property
    def encrypted(self) -> bool:
        """Whether the body is."""
        return self.nonce != PLAIN

    @property
    def digest_bytes(self) -> int:
        """Length of the prefix digests that follow the header."""
        return self.tokens // PREFIX_TOKENS * PREFIX_BYTES

    @property
    def body_at(self) -> int:
        """Where the body begins: everything before it can be read, and proven, alone."""
        return HEADER_BYTES + self.digest_bytes

    @property
    def payload_bytes(self) -> int:
        """Length of what the codec wrote."""
        return self.body_bytes - 4 * self.tokens - (TAG_BYTES if self.encrypted else 0)

    @property
    def raw_bytes(self) -> int:
        """Size of the KV array."""
        return math.prod(self.shape) * KV_DTYPES[self.dtype].itemsize

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.body_at + self.body_bytes

    def expired(self, now: float) -> bool:
        """Whether the chunk may not be handed out any more."""
        return 0 < self.expires <= now


def body_bytes(tokens: int, payload: int, *, encrypted: bool) -> int:
    """Length of the body of so many tokens and bytes of payload."""
    return 4 * tokens + payload + (TAG_BYTES if encrypted else 0)


def pack_chunk(header: ChunkHeader, prefix: bytes, ids: Ids, payload: bytes, cipher: Cipher | None) -> bytearray:
    """The bytes of the chunk's file; `cipher` for an encrypted one.

    Raises `ValueError` where the header does not fit the rest.
    """
    if (len(ids), len(payload), len(prefix)) != (header.tokens, header.payload_bytes, header.digest_bytes):
        raise ValueError("the header does not describe these ids, digests and payload")
    if header.encrypted != (cipher is not None):
        raise ValueError("a nonce and a cipher go together")
    data = bytearray(header.file_bytes)
    FIELDS.pack_into(
        data,
        0,
        MAGIC,
        FORMAT_VERSION,
        header.start,
        header.key,
        header.parent,
        header.identity,
        header.model,
        header.band.encode("ascii"),
        *header.shape,
        header.dtype.encode("ascii"),
        header.codec.encode("ascii"),
        header.fidelity.encode("ascii"),
        header.body_bytes,
        header.created,
        header.expires,
        header.owner,
        header.nonce,
        header.key_id,
    )
    data[HEADER_BYTES : header.body_at] = prefix
    body = memoryview(data)[header.body_at :]
    plain = b"".join((ids.astype("<u4", copy=False).tobytes(), payload))
    if cipher is None:
        body[:] = plain
    else:
        cipher.encrypt_into(header.nonce, plain, _associated(data, header), body)
    view = memoryview(data)
    view[CHECKSUM_AT:SEAL_AT] = _checksum(view)
    view[SEAL_AT:HEADER_BYTES] = _seal(view, header)
    return data


def read_header(data: Buffer, file_bytes: int) -> ChunkHeader:
    """The header in the first `HEADER_BYTES` of a file of `file_bytes`; checks form and length, proves nothing.

    Raises `BadChunk` with what is wrong, `OldChunk` for a file of an earlier format.
    """
    if (
        len(data) >= 12
        and bytes(data[:8]) == MAGIC
        and int.from_bytes(data[8:12], "little") in range(1, FORMAT_VERSION)
    ):
        raise OldChunk("the file is of an earlier format")
    if len(data) < HEADER_BYTES:
        raise BadChunk(f"file of {file_bytes} bytes is shorter than a header")
    magic, version, start, key, parent, identity, model, band, *rest = FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise BadChunk("not a chunk file: wrong magic")
    if version != FORMAT_VERSION:
        raise BadChunk(f"format version {version}; this program reads {FORMAT_VERSION}")
    layers, pair, heads, tokens, dim, dtype, codec, fidelity, length, created, expires, owner, nonce, key_id = rest
    shape = (layers, pair, heads, tokens, dim)
    names = _text(dtype), _text(codec), _text(fidelity)
    if names[0] not in KV_DTYPES:
        raise BadChunk(f"unknown dtype {names[0]!r}")
    if names[2] not in RUNGS:
        raise BadChunk(f"unknown fidelity {names[2]!r}")
    if not (math.isfinite(created) and math.isfinite(expires)):
        raise BadChunk("a time in the header is not one")
    header = ChunkHeader(
        key=key,
        parent=parent,
        identity=identity,
        model=model,
        band=_text(band),
        start=start,
        shape=shape,
        dtype=names[0],
        codec=names[1],
        fidelity=fidelity_named(names[2]),
        body_bytes=length,
        created=created,
        expires=expires,
        owner=owner,
        nonce=nonce,
        key_id=key_id,
    )
    if not 0 < header.raw_bytes <= MAX_RAW_BYTES or pair != 2:
        raise BadChunk(f"impossible shape {shape}")
    if not 0 <= header.payload_bytes <= 2 * header.raw_bytes + HEADER_BYTES:
        raise BadChunk(f"impossible payload of {header.payload_bytes} bytes for shape {shape}")
    if header.file_bytes != file_bytes:
        raise BadChunk(f"file of {file_bytes} bytes; its header says {header.file_bytes}")
    return header


def read_head(data: Buffer, file_bytes: int) -> tuple[ChunkHeader, bytes]:
    """Header and prefix digests, proven by the seal; `data` is the file's beginning, at least up to its body.

    Raises `BadChunk` and `OldChunk` as `read_header` does.
    """
    header = read_header(data[:HEADER_BYTES], file_bytes)
    view = memoryview(data)
    if len(view) < header.body_at or _seal(view, header) != view[SEAL_AT:HEADER_BYTES]:
        raise BadChunk("header or prefix digests were changed")
    return header, bytes(view[HEADER_BYTES : header.body_at])


def verify_chunk(data: memoryview) -> tuple[ChunkHeader, bytes]:
    """Header and prefix digests of a whole file, all of which is proven by the checksum; needs no key.

    Raises `BadChunk` and `OldChunk`.
    """
    header, prefix = read_head(data, len(data))
    if _checksum(data) != data[CHECKSUM_AT:SEAL_AT]:
        raise BadChunk("checksum does not match")
    return header, prefix


def open_chunk(data: memoryview, cipher: Cipher | None, plain: memoryview) -> tuple[ChunkHeader, Ids, memoryview]:
    """Header, token ids and payload of a whole file, all of it proven; the last two as views.

    An encrypted body is decrypted into `plain`, scratch at least as long as the file. Raises `BadChunk` with what is
    wrong, and `NoKey` where the file is encrypted and no cipher was given.
    """
    header, _ = read_head(data, len(data))
    body = data[header.body_at :]
    if not header.encrypted:
        verify_chunk(data)
    elif cipher is None:
        raise NoKey
    else:
        plain = plain[: header.body_bytes - TAG_BYTES]
        try:
            cipher.decrypt_into(header.nonce, body, _associated(data, header), plain)
        except InvalidTag as error:
            raise BadChunk("the body does not decrypt: it was changed, or written under another key") from error
        body = plain
    ids_end = 4 * header.tokens
    return header, np.frombuffer(body[:ids_end], "<u4"), body[ids_end:]


def _associated(data: Buffer, header: ChunkHeader) -> bytes:
    view = memoryview(data)
    return bytes(view[:CHECKSUM_AT]) + bytes(view[HEADER_BYTES : header.body_at])


def _checksum(data: memoryview) -> bytes:
    return blake3(data[:CHECKSUM_AT]).update(data[HEADER_BYTES:]).digest()


def _seal(data: memoryview, header: ChunkHeader) -> bytes:
    return blake3(data[:SEAL_AT]).update(data[HEADER_BYTES : header.body_at]).digest(HEADER_BYTES - SEAL_AT)


def _text(field: bytes) -> str:
    try:
        return field.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError as error:
        raise BadChunk("a name in the header is not ASCII") from error
