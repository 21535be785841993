"""A small identity, KV that depends on its tokens, and the check that what is restored is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory.kv.identity import LAYOUT, KVIdentity, key_of, owner_id, pack_ids, prefix_digests
from memory.kv.settings import KVSettings
from memory.kv.store import KVStore
from memory.kv.tiers.base import ChunkData

CHUNK = 32
SETTINGS = KVSettings(
    chunk_tokens=CHUNK, min_tokens=4, disk_reserve_bytes=0, retry_seconds=0.0, lock_seconds=20.0, upkeep_seconds=0.0
)


def identity(**changes: Any) -> KVIdentity:
    """The identity of the tests, with some fields changed."""
    fields: dict[str, Any] = {
        "weights_id": "ab" * 32,
        "compute_format": "bf16",
        "kv_dtype": "bfloat16",
        "layers": 3,
        "kv_heads": 2,
        "head_dim": 8,
        "layout": LAYOUT,
        "rope": '{"theta":10000}',
        "attention": "{}",
        "tenant_secret": "secret",
    }
    return KVIdentity(**(fields | changes))


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Token ids that depend on the seed from the first one on."""
    return [int(value) for value in np.random.default_rng(seed).integers(0, 50_000, tokens)]


def kv_of(ids: list[int], of: KVIdentity | None = None) -> NDArray[Any]:
    """KV in which every number depends on all tokens up to its own, as in a real cache; any bit pattern occurs."""
    of = of or identity()
    running = np.cumsum(np.asarray(ids, np.uint64) * np.uint64(2654435761) + np.uint64(12345))
    layers, pair, heads, _tokens, dim = of.shape(len(ids))
    place = np.arange(layers * pair * heads * dim, dtype=np.uint64).reshape(layers, pair, heads, 1, dim)
    mixed = (running[:, None] * np.uint64(0x9E3779B97F4A7C15)) ^ (place * np.uint64(0xC2B2AE3D27D4EB4F))
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # splitmix64: noise, so that all chunks are one size
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(multiplier)
    mixed ^= mixed >> np.uint64(31)
    return np.ascontiguousarray(mixed.astype(f"<u{of.dtype.itemsize}")).view(of.dtype)


def chunk_data(
    parent: bytes, ids: list[int], kv: NDArray[Any], of: KVIdentity | None = None, **changes: Any
) -> ChunkData:
    """A chunk in memory, as the store hands it to its tiers."""
    of = of or identity()
    packed = pack_ids(ids)
    fields: dict[str, Any] = {
        "key": key_of(parent, packed, of.digest()),
        "parent": parent,
        "identity": of.digest(),
        "model": of.model_digest(),
        "band": of.band,
        "weights_id": of.weights_id,
        "tenant_secret": of.tenant_secret,
        "owner": owner_id(of.tenant_secret, ""),
        "start": 0,
        "ids": packed,
        "prefix": prefix_digests(parent, packed, of.digest()),
        "kv_dtype": of.kv_dtype,
        "kv": kv,
        "fidelity": "exact",
        "follows": 0,
        "expires": 0.0,
        "stamp": 0.0,
    }
    return ChunkData(**(fields | changes))


def open_store(folder: Path, **changes: Any) -> KVStore:
    """A store with small chunks."""
    return KVStore(SETTINGS.model_copy(update=changes), folder)


def restore(store: KVStore, ids: list[int], of: KVIdentity | None = None) -> int:
    """Matches and loads `ids`; proves that what came is exactly their KV, and returns how many tokens came."""
    of = of or identity()
    match = store.match(of, ids)
    out = np.zeros(of.shape(len(ids)), of.dtype)
    tokens = store.load(of, match, out)
    assert tokens <= match.tokens <= len(ids)
    assert out[:, :, :, :tokens].tobytes() == kv_of(ids, of)[:, :, :, :tokens].tobytes()
    return tokens
