"""The RAM tier keeps its budget and its order whatever happens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memory.kv.fidelity import RUNGS, Fidelity
from memory.kv.identity import Chain
from memory.kv.tiers.base import ChunkData
from memory.kv.tiers.ram import RamTier
from tests.memory.kv.common import chunk_data, identity, prompt

BUDGET = 1000


def chunk(parent: bytes, seed: int, tokens: int, stamp: float, fidelity: Fidelity = "exact") -> ChunkData:
    of = identity(layers=1, kv_heads=1, head_dim=1)
    kv = np.zeros(of.shape(tokens), np.uint16)
    return chunk_data(parent, prompt(tokens, seed=seed), kv, of=of, stamp=stamp, fidelity=fidelity)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "touch", "supersede", "forget"]), st.integers(0, 7), st.integers(1, 200)),
    max_size=30,
)


@given(OPERATIONS)
def test_bytes_budget_and_siblings_always_agree(operations: list[tuple[str, int, int]]) -> None:
    ram = RamTier(BUDGET)
    root = identity().digest()
    known: dict[bytes, ChunkData] = {}
    for clock, (name, seed, tokens) in enumerate(operations):
        item = chunk(root, seed, tokens, float(clock))
        if name == "put":
            if ram.put(item):
                known[item.key] = item
                assert ram.get(item.key) is not None
        elif name == "touch":
            ram.touch(list(known), float(clock))
        elif name == "supersede":
            ram.supersede([item.key])
        else:
            assert ram.forget([item.key]) in (0, 1)
            assert ram.get(item.key) is None
        held = [known[key] for key in known if ram.get(key) is not None]
        stats = ram.stats()
        assert stats.bytes == sum(item.kv.nbytes for item in held) <= BUDGET
        assert stats.chunks == len(held)
        assert stats.tokens == sum(len(item.ids) for item in held)
        assert {stored.key for stored in ram.siblings(root, 100)} == {item.key for item in held}
        assert ram.lengths(root) == sorted({len(item.ids) for item in held})


def test_the_most_recently_used_siblings_come_first() -> None:
    ram = RamTier(BUDGET)
    chain = Chain(identity(), [], 4)
    items = [chunk(chain.root, seed, 10, float(seed)) for seed in range(5)]
    assert all(ram.put(item) for item in items)
    ram.touch([items[1].key], 9.0)
    assert [stored.key for stored in ram.siblings(chain.root, 2)] == [items[1].key, items[4].key]


def test_the_more_exact_one_stays() -> None:
    ram = RamTier(BUDGET)
    root = identity().digest()
    best = len(RUNGS)
    for rung in ("int4", "compact", "int8", "int4", "exact", "int8"):
        item = chunk(root, 0, 10, 1.0, rung)
        assert ram.put(item)
        best = min(best, RUNGS.index(rung))
        held = ram.get(item.key)
        assert held is not None
        assert held.fidelity == ram.find([item.key])[item.key].fidelity == RUNGS[best]
        assert ram.stats().bytes == item.kv.nbytes


def test_an_expired_chunk_leaves_and_makes_way() -> None:
    ram = RamTier(BUDGET)
    root = identity().digest()
    item = chunk(root, 0, 10, 1.0)
    assert ram.put(replace(item, expires=1.0))
    assert ram.find([item.key]) == {}
    assert ram.siblings(root, 5) == []
    assert ram.get(item.key) is None
    assert ram.stats().bytes == 0
    assert ram.put(item)
    assert ram.get(item.key) is item


def test_chunks_are_found_by_their_owner() -> None:
    ram = RamTier(BUDGET)
    root = identity().digest()
    mine, other = replace(chunk(root, 0, 10, 1.0), owner=b"m" * 16), chunk(root, 1, 10, 1.0)
    assert ram.put(mine)
    assert ram.put(other)
    assert ram.owned_by({mine.owner}) == [mine.key]
    assert ram.owned_by({b"x" * 16}) == []
