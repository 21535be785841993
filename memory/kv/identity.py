"""What a chunk's KV depends on, and the keys made of it.

Invariants:
- A key is `blake3(parent key, token ids, identity)`. Every part is framed by its type and its length, so that no
  two different inputs are one byte string.
- The same content has the same key in every process on every machine; other weights, another format, another
  tenant have another key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

Ids = NDArray[np.uint32]
TokenIds = Sequence[int] | NDArray[np.integer[Any]]

DIGEST_BYTES = 32
KV_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),  # numpy has no bfloat16: it travels as its bits
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}
LAYOUT = "layers,kv,heads,tokens,dim"


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """Everything besides the token ids that the bytes of a KV cache depend on.

    Raises `ValueError` for an unknown `kv_dtype` or `layout` and for counts below one.
    """

    weights_id: str
    """Digest of the base weights, plus `+` and the adapter's digest where there is one. Never a name or a path."""
    compute_format: str
    """The format the weights compute in: "bf16", "bf16-merged", ..."""
    kv_dtype: str
    """A key of `KV_DTYPES`."""
    layers: int
    kv_heads: int
    head_dim: int
    layout: str
    """Order of the array's axes, always `LAYOUT`."""
    rope: str
    """Canonical JSON of the rotary embedding's configuration."""
    attention: str
    """Canonical JSON of the attention's configuration: window, scale, norms."""
    tenant_secret: str = field(repr=False)
    """Secret of the tenant: two tenants never share a chunk, nor learn of one through timing."""

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype {self.kv_dtype!r} is unknown; known are {sorted(KV_DTYPES)}")
        if self.layout != LAYOUT:
            raise ValueError(f"layout {self.layout!r} is unknown; chunks are laid out as {LAYOUT!r}")
        if min(self.layers, self.kv_heads, self.head_dim) < 1:
            raise ValueError(f"layers, kv_heads and head_dim must be at least 1, got {self.shape(1)}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the KV arrays."""
        return KV_DTYPES[self.kv_dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of raw KV per token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of the KV array of `tokens` tokens."""
        return (self.layers, 2, self.kv_heads, tokens, self.head_dim)

    def digest(self) -> bytes:
        """32 bytes of blake3 over every field, its name, type and length included. The parent of first chunks."""
        parts: list[str | int | bytes] = ["kvloop identity 1"]
        for entry in fields(self):
            parts += [entry.name, getattr(self, entry.name)]
        return blake3(frame(*parts)).digest()


def frame(*parts: str | int | bytes) -> bytes:
    """One byte string for a sequence of values; different sequences never give the same one."""
    framed = bytearray()
    for part in parts:
        if isinstance(part, str):
            tag, data = b"s", part.encode("utf-8", "surrogatepass")
        elif isinstance(part, bytes):
            tag, data = b"b", part
        else:
            tag, data = b"i", b"%d" % part
        framed += tag + len(data).to_bytes(8, "little") + data
    return bytes(framed)


def pack_ids(token_ids: TokenIds) -> Ids:
    """Token ids as little-endian uint32, shape [tokens]. Raises `ValueError` for ids outside 0 .. 2**32 - 1."""
    ids = np.asarray(token_ids) if len(token_ids) else np.zeros(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a flat list of integers, got {ids.dtype} of shape {ids.shape}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > 0xFFFFFFFF):
        raise ValueError("token ids must lie in 0 .. 2**32 - 1")
    return np.ascontiguousarray(ids, dtype="<u4")


def chunk_key(parent: bytes, token_ids: TokenIds, identity: KVIdentity) -> bytes:
    """Key of the chunk that holds `token_ids` and follows the chunk `parent` (a first chunk's is the digest)."""
    return key_of(parent, pack_ids(token_ids), identity.digest())


def key_of(parent: bytes, ids: Ids, identity_digest: bytes) -> bytes:
    """`chunk_key` for ids that are packed and an identity that is digested already."""
    if len(parent) != DIGEST_BYTES:
        raise ValueError(f"a parent key has {DIGEST_BYTES} bytes, got {len(parent)}")
    return blake3(frame("kvloop chunk 1", parent, ids.tobytes(), identity_digest)).digest()


class Chain:
    """The keys along one sequence of tokens: its full chunks, and whatever tail one asks for."""

    def __init__(self, identity: KVIdentity, token_ids: TokenIds, chunk_tokens: int) -> None:
        self.root = identity.digest()
        self.ids = pack_ids(token_ids)
        self.chunk_tokens = chunk_tokens
        self.keys: list[bytes] = []
        parent = self.root
        for start in range(0, len(self.ids) - chunk_tokens + 1, chunk_tokens):
            parent = key_of(parent, self.ids[start : start + chunk_tokens], self.root)
            self.keys.append(parent)

    def parent(self, chunk: int) -> bytes:
        """Key of the chunk before number `chunk`."""
        return self.keys[chunk - 1] if chunk else self.root

    def tail_key(self, chunk: int, tokens: int) -> bytes:
        """Key of a chunk of `tokens` tokens that stands where full chunk number `chunk` would."""
        start = chunk * self.chunk_tokens
        return key_of(self.parent(chunk), self.ids[start : start + tokens], self.root)
