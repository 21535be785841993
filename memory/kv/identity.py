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
MODEL_BYTES = OWNER_BYTES = BAND_BYTES = 16
PREFIX_TOKENS = 16
PREFIX_BYTES = 8
"""A chunk is also named by digests of its first 16, 32, ... tokens, so that a partial overlap is found without the
tokens themselves."""


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
    band: str = "all"
    """Which slice of the model's per-token state this is: "all", or with shared layers L "0-L" (KV of the layers
    below L), "hidden-L" (what enters layer L, carried as `[1, 2, 1, tokens, hidden / 2]`), "L-N" (KV from L on).
    Printable ASCII, `BAND_BYTES` at most."""

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype {self.kv_dtype!r} is unknown; known are {sorted(KV_DTYPES)}")
        if self.layout != LAYOUT:
            raise ValueError(f"layout {self.layout!r} is unknown; chunks are laid out as {LAYOUT!r}")
        if min(self.layers, self.kv_heads, self.head_dim) < 1:
            raise ValueError(f"layers, kv_heads and head_dim must be at least 1, got {self.shape(1)}")
        if not (0 < len(self.band) <= BAND_BYTES and self.band.isascii() and self.band.isprintable()):
            raise ValueError(f"band must be 1 to {BAND_BYTES} printable ASCII characters, got {self.band!r}")

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
        return self._digest("kvloop identity 2", {})

    @property
    def weights_id_base(self) -> str:
        """The base's part of the weights id."""
        return self.weights_id.split("+", 1)[0]

    def model_digest(self) -> bytes:
        """`MODEL_BYTES` that group chunks by base, format, shape and band, over all tenants and adapters.

        A merged adapter computes in its base's format ("bf16-merged" in "bf16"), so it belongs to the same group.
        """
        group: dict[str, str] = {
            "weights_id": self.weights_id_base,
            "compute_format": self.compute_format.split("-", 1)[0],
            "tenant_secret": "",
        }
        return self._digest("kvloop model 1", group)[:MODEL_BYTES]

    def _digest(self, purpose: str, instead: dict[str, str]) -> bytes:
        parts: list[str | int | bytes] = [purpose]
        for entry in fields(self):
            parts += [entry.name, instead.get(entry.name, getattr(self, entry.name))]
        return blake3(frame(*parts)).digest()


def needs_exact(band: str) -> bool:
    """Whether what a band holds is of use only while it is exact: states that further layers are computed from."""
    return band.startswith("hidden-")


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


def prefix_digests(parent: bytes, ids: Ids, identity_digest: bytes) -> bytes:
    """`PREFIX_BYTES` for each full `PREFIX_TOKENS` of a chunk: a digest of parent, identity and all ids up to there.

    They tell nothing of the tokens to who does not know the tenant's secret, which the identity's digest covers.
    """
    hasher = blake3(frame("kvloop prefix 1", parent, identity_digest))
    step = 4 * PREFIX_TOKENS
    data = ids.tobytes()
    ends = range(step, len(data) + 1, step)
    return b"".join(hasher.update(data[end - step : end]).digest(PREFIX_BYTES) for end in ends)


def agreeing_tokens(left: bytes, right: bytes) -> int:
    """How many tokens two chunks begin with alike, by their `prefix_digests`: a multiple of `PREFIX_TOKENS`."""
    agreed = 0
    for at in range(0, min(len(left), len(right)), PREFIX_BYTES):
        if left[at : at + PREFIX_BYTES] != right[at : at + PREFIX_BYTES]:
            break
        agreed += PREFIX_TOKENS
    return agreed


def owner_id(tenant_secret: str, owner: str) -> bytes:
    """`OWNER_BYTES` that stand for an owner of a tenant; "" is the tenant itself."""
    return blake3(frame("kvloop owner 1", tenant_secret, owner)).digest(OWNER_BYTES)


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
