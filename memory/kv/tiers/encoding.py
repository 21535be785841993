"""From a chunk in memory to the bytes of its file: the codec, the fidelity it leaves, the encryption.

The fidelity written is the worse of the KV's own and of the codec's: writing again never improves it.
"""

from __future__ import annotations

import time
from dataclasses import replace

from memory.kv.chunk import NO_KEY, PLAIN, ChunkHeader, body_bytes, pack_chunk
from memory.kv.codec.base import Codec, Kept
from memory.kv.codec.factory import Codecs
from memory.kv.fidelity import RUNGS, Fidelity, fidelity_named, worse
from memory.kv.identity import needs_exact
from memory.kv.keyring import OwnerKey
from memory.kv.tiers.base import ChunkData, kept_of
from memory.kv.tiers.reader import Whole


def encoder_for(codecs: Codecs, name: Fidelity, model: bytes, band: str) -> Codec:
    """The codec of that name, or of the next better rung where it cannot encode KV of this model and band."""
    if needs_exact(band):
        name = "exact"
    for rung in reversed(RUNGS[: RUNGS.index(name) + 1]):
        codec = codecs.encoder(rung, model)
        if codec is not None:
            return codec
    raise AssertionError("exact encodes everything")


def encode(
    chunk: ChunkData, codec: Codec, payload: bytes, key: OwnerKey | None, nonce: bytes
) -> tuple[ChunkHeader, bytearray]:
    """Header and bytes of the file of a chunk whose `payload` the codec has made; without a key, not encrypted."""
    header = ChunkHeader(
        key=chunk.key,
        parent=chunk.parent,
        identity=chunk.identity,
        model=chunk.model,
        band=chunk.band,
        start=chunk.start,
        shape=chunk.kv.shape,
        dtype=chunk.kv_dtype,
        codec=codec.name,
        fidelity=worse(chunk.fidelity, fidelity_named(codec.name)),
        body_bytes=body_bytes(chunk.tokens, len(payload), encrypted=key is not None),
        created=time.time(),
        expires=chunk.expires,
        owner=chunk.owner,
        nonce=nonce if key else PLAIN,
        key_id=key.id if key else NO_KEY,
    )
    return header, pack_chunk(header, chunk.prefix, chunk.ids, payload, key.cipher if key else None)


def payload_of(chunk: ChunkData, codec: Codec) -> bytes:
    """What the codec makes of a chunk, with both ends of its sequence kept exact."""
    return codec.encode(chunk.kv, kept_of(chunk.start, chunk.follows), chunk.start)


def encode_again(
    whole: Whole, codec: Codec, kept: Kept, key: OwnerKey | None, nonce: bytes
) -> tuple[ChunkHeader, bytearray] | None:
    """Header and bytes of the file by another codec; None where it would not become smaller, or its key is gone."""
    old = whole.header
    if old.encrypted and (key is None or key.id != old.key_id):
        return None
    payload = codec.encode(whole.kv, kept, old.start)
    new = replace(
        old,
        codec=codec.name,
        fidelity=worse(old.fidelity, fidelity_named(codec.name)),
        body_bytes=body_bytes(old.tokens, len(payload), encrypted=old.encrypted),
        nonce=nonce if old.encrypted else PLAIN,
    )
    if new.file_bytes >= old.file_bytes:
        return None
    return new, pack_chunk(new, whole.prefix, whole.ids, payload, key.cipher if key and old.encrypted else None)
