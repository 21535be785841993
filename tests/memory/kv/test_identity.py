"""Keys: the same content has the same key everywhere, different content never."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.kv.identity import (
    PREFIX_BYTES,
    PREFIX_TOKENS,
    Chain,
    KVIdentity,
    agreeing_tokens,
    chunk_key,
    frame,
    owner_id,
    pack_ids,
    prefix_digests,
)
from tests.memory.kv.common import identity

PARTS = st.lists(st.one_of(st.text(max_size=6), st.integers(-(2**70), 2**70), st.binary(max_size=6)), max_size=5)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=12)


def typed(parts: list[Any]) -> list[tuple[type, Any]]:
    return [(type(part), part) for part in parts]


@given(PARTS, PARTS)
def test_different_values_are_never_framed_alike(left: list[Any], right: list[Any]) -> None:
    assert (frame(*left) == frame(*right)) == (typed(left) == typed(right))


@given(st.text(max_size=8), st.text(max_size=8), st.integers(0, 8))
def test_moving_a_letter_between_fields_changes_the_digest(left: str, right: str, at: int) -> None:
    joined = left + right
    moved = joined[:at], joined[at:]
    one = identity(rope=left, attention=right).digest()
    two = identity(rope=moved[0], attention=moved[1]).digest()
    assert (one == two) == ((left, right) == moved)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights_id", "ab" * 32 + "+" + "cd" * 32),
        ("compute_format", "bf16-merged"),
        ("kv_dtype", "float16"),
        ("layers", 4),
        ("kv_heads", 1),
        ("head_dim", 16),
        ("rope", '{"theta":500000}'),
        ("attention", '{"window":4096}'),
        ("tenant_secret", "another"),
        ("band", "12-30"),
    ],
)
def test_every_field_counts(field: str, value: Any) -> None:
    changed = identity(**{field: value})
    assert changed.digest() != identity().digest()
    assert chunk_key(identity().digest(), [1, 2], changed) != chunk_key(identity().digest(), [1, 2], identity())


def test_the_secret_is_not_printed() -> None:
    assert "secret" not in repr(identity(tenant_secret="secret")).replace("tenant_secret", "")


@given(IDS, IDS)
def test_keys_differ_where_ids_or_parents_differ(left: list[int], right: list[int]) -> None:
    root = identity().digest()
    assert (chunk_key(root, left, identity()) == chunk_key(root, right, identity())) == (left == right)
    parent = chunk_key(root, [7], identity())
    assert chunk_key(parent, left, identity()) != chunk_key(root, left, identity())


def test_a_key_is_the_same_for_lists_and_arrays_of_any_integer_type() -> None:
    root = identity().digest()
    keys = {chunk_key(root, ids, identity()) for ids in ([1, 2], np.array([1, 2]), np.array([1, 2], np.uint16))}
    assert len(keys) == 1


def test_a_key_is_the_same_in_another_process() -> None:
    code = (
        "from tests.memory.kv.common import identity; from memory.kv.identity import chunk_key;"
        "print(chunk_key(identity().digest(), [1, 2, 3], identity()).hex())"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert keys == {chunk_key(identity().digest(), [1, 2, 3], identity()).hex()}


@given(IDS, st.integers(1, 5))
def test_a_chain_has_the_keys_of_its_chunks(ids: list[int], size: int) -> None:
    chain = Chain(identity(), ids, size)
    assert len(chain.keys) == len(ids) // size
    parent = identity().digest()
    for number, key in enumerate(chain.keys):
        assert chain.parent(number) == parent
        assert key == chunk_key(parent, ids[number * size : (number + 1) * size], identity())
        parent = key
    rest = len(ids) % size
    assert chain.tail_key(len(chain.keys), rest) == chunk_key(parent, ids[len(ids) - rest :], identity())


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], [[1, 2]], ["a"]])
def test_impossible_ids_are_refused(ids: Any) -> None:
    with pytest.raises(ValueError, match="token ids must"):
        pack_ids(ids)


NAMES = st.text(max_size=5)
IDENTITIES = st.builds(
    identity,
    weights_id=NAMES,
    compute_format=NAMES,
    kv_dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 3),
    rope=NAMES,
    attention=NAMES,
    tenant_secret=NAMES,
    band=st.sampled_from(["all", "0-1", "hidden-1", "1-3"]),
)


@given(IDENTITIES, IDENTITIES)
def test_identities_are_one_exactly_where_all_their_fields_are(one: KVIdentity, other: KVIdentity) -> None:
    assert (one.digest() == other.digest()) == (one == other)


@given(IDENTITIES, st.text(max_size=5), NAMES)
def test_a_model_is_one_over_tenants_adapters_and_merging(of: KVIdentity, adapter: str, tenant: str) -> None:
    base = of.weights_id.split("+")[0]
    compute = of.compute_format.split("-")[0]
    fields = {name: getattr(of, name) for name in of.__dataclass_fields__}
    same = {"weights_id": f"{base}+{adapter}", "tenant_secret": tenant, "compute_format": f"{compute}-merged"}
    assert identity(**(fields | same)).model_digest() == of.model_digest()
    for other in ({"layers": 4}, {"weights_id": base + "x"}, {"band": "9-12"}, {"rope": of.rope + " "}):
        assert identity(**(fields | other)).model_digest() != of.model_digest()
    assert len(of.model_digest()) == 16


@given(st.lists(st.integers(0, 2), max_size=70), st.lists(st.integers(0, 2), max_size=70))
def test_prefix_digests_agree_exactly_as_far_as_the_tokens(left: list[int], right: list[int]) -> None:
    root = identity().digest()
    one, two = (prefix_digests(root, pack_ids(ids), root) for ids in (left, right))
    assert len(one) == len(left) // PREFIX_TOKENS * PREFIX_BYTES
    common = next((at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
    agreed = min(len(left), len(right)) if common is None else common
    assert agreeing_tokens(one, two) == agreed // PREFIX_TOKENS * PREFIX_TOKENS


def test_prefix_digests_depend_on_what_came_before_and_on_the_identity() -> None:
    ids, root = pack_ids(range(16)), identity().digest()
    other = identity(tenant_secret="another").digest()
    digests = [prefix_digests(*way) for way in ((root, ids, root), (b"p" * 32, ids, root), (root, ids, other))]
    assert len(set(digests)) == 3


@given(st.tuples(NAMES, NAMES), st.tuples(NAMES, NAMES))
def test_owners_of_different_tenants_or_names_differ(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (owner_id(*one) == owner_id(*other)) == (one == other)
    assert len(owner_id(*one)) == 16


@pytest.mark.parametrize("band", ["", "0123456789abcdefg", "\u00e4", "a\0", "a\n"])
def test_bands_are_short_printable_ascii(band: str) -> None:
    with pytest.raises(ValueError, match="band"):
        identity(band=band)


@pytest.mark.parametrize("change", [{"kv_dtype": "int8"}, {"layout": "tokens,heads"}, {"layers": 0}, {"head_dim": -1}])
def test_impossible_identities_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        identity(**change)


def test_a_parent_must_be_a_key() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        chunk_key(b"short", [1], identity())
