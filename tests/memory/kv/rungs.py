"""Codecs that keep only the first bits of each number, so that a test can say exactly what each rung gives back."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memory.kv.codec.base import NOTHING_KEPT, CodecError, Kept, KVArray
from memory.kv.codec.exact import ExactCodec
from memory.kv.codec.factory import Codecs
from memory.kv.counters import Counters
from memory.kv.fidelity import Fidelity, FidelityRecord
from memory.kv.identity import KVIdentity
from memory.kv.settings import KVSettings
from memory.kv.store import KVStore
from memory.kv.tiers.disk import DiskTier
from memory.kv.upkeep import Upkeep
from tests.memory.kv.common import identity, kv_of

BITS = {"exact": 16, "int8": 8, "int4": 4, "compact": 2}


class FirstBits:
    """Keeps the first `BITS` of each number; notes what it was asked to keep exact."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[tuple[int, Kept]] = []

    def encode(self, kv: KVArray, kept: Kept = NOTHING_KEPT, start: int = 0) -> bytes:
        self.asked.append((start, kept))
        bits = np.unpackbits(np.ascontiguousarray(kv).view("u1").reshape(-1, 2)[:, ::-1], axis=1)
        return np.packbits(bits[:, : BITS[self.name]]).tobytes()

    def decode(self, payload: memoryview, out: KVArray, start: int = 0) -> None:
        bits = np.unpackbits(np.frombuffer(payload, "u1"))
        if bits.size != out.size * BITS[self.name]:
            raise CodecError("of another size")
        whole = np.zeros((out.size, 16), "u1")
        whole[:, : BITS[self.name]] = bits.reshape(out.size, -1)
        out[...] = np.packbits(whole, axis=1)[:, ::-1].copy().view("<u2").reshape(out.shape)


Rungs = dict[str, Any]


def use_rungs(monkeypatch: pytest.MonkeyPatch, *, without: str = "") -> Rungs:
    """Has all stores use `FirstBits`; `without` names a rung that nothing can be encoded for."""
    rungs: Rungs = {"exact": ExactCodec(), **{name: FirstBits(name) for name in ("int8", "int4", "compact")}}
    monkeypatch.setattr(Codecs, "named", lambda _, name: rungs[name])
    monkeypatch.setattr(Codecs, "encoder", lambda _, name, __: None if name == without else rungs[name])
    return rungs


def trust(store: KVStore, codec: Fidelity, kl: float = 0.001, weights_id: str = "ab" * 32) -> None:
    """Records that a rung costs the model of the tests so much."""
    store.fidelity.put(
        FidelityRecord(
            weights_id_base=weights_id,
            codec=codec,
            kl_mean=kl,
            kl_p95=kl,
            top1=1.0,
            tokens=1000,
            noise_kl=0.0,
            bytes_per_token=1.0,
            ratio=2.0,
            measured_at=0.0,
        )
    )


def disk_of(store: KVStore) -> DiskTier:
    """The store's disk tier, which upkeep works on."""
    assert store._disk is not None
    return store._disk


class Clock:
    """Says what time it is, so many seconds from now."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


def upkeep_of(store: KVStore, clock: Clock | None = None, settings: KVSettings | None = None) -> Upkeep:
    """Upkeep of a store that is not started: tests step it."""
    return Upkeep(disk_of(store), settings or store.settings, store.fidelity, Counters(), clock or Clock())


def expected(ids: list[int], rung: str, of: KVIdentity | None = None) -> NDArray[Any]:
    """The KV of `ids` as a rung gives it back."""
    bits = BITS[rung]
    return (kv_of(ids, of) >> (16 - bits) << (16 - bits)).astype("<u2")


def rungs_of(store: KVStore, ids: list[int]) -> list[str]:
    """Restores `ids`, proves that each chunk is as its rung gives it back, and returns the rungs."""
    of = identity()
    match = store.match(of, ids)
    out = np.zeros(of.shape(len(ids)), of.dtype)
    found, start = [], 0
    for loaded in store.load_from(of, match, out):
        part = slice(start, start + loaded.tokens)
        assert out[:, :, :, part].tobytes() == expected(ids, loaded.fidelity)[:, :, :, part].tobytes()
        found.append(str(loaded.fidelity))
        start += loaded.tokens
    return found
