"""The exact codec loses nothing, and refuses every payload that is not its own: natively and in Python alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from memory.kv.codec import native
from memory.kv.codec.base import CodecError, Kept
from memory.kv.codec.exact import ExactCodec
from memory.kv.codec.factory import codec_named
from memory.kv.identity import KV_DTYPES

CODEC = ExactCodec()
SHAPES = st.tuples(st.integers(1, 3), st.just(2), st.integers(1, 3), st.integers(1, 9), st.sampled_from([1, 2, 5, 8]))
SPECIAL = {
    "bfloat16": [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x8000, 0x0000, 0x7F7F],
    "float16": [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0x0001, 0x8001, 0x8000, 0x0000, 0x7BFF],
    "float32": [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 1, 0x80000001, 0x80000000, 0, 0x7F7FFFFF],
}


@pytest.fixture(autouse=True, scope="module", params=["native", "python"])
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test here runs twice. Compiling comes first: it takes longer than a test may."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setenv("KVLOOP_NATIVE", "0")
        native.warm()
        yield


def round_trip(kv: NDArray[Any]) -> NDArray[Any]:
    out = np.empty(kv.shape, kv.dtype)
    CODEC.decode(memoryview(CODEC.encode(kv)), out)
    return out


@pytest.mark.parametrize("name", sorted(KV_DTYPES))
@given(data=st.data())
def test_any_bit_pattern_comes_back(name: str, data: st.DataObject) -> None:
    bits = np.dtype(f"<u{KV_DTYPES[name].itemsize}")
    elements = st.one_of(st.sampled_from(SPECIAL[name]), st.integers(0, 2 ** (8 * bits.itemsize) - 1))
    kv = data.draw(hnp.arrays(bits, data.draw(SHAPES), elements=elements)).view(KV_DTYPES[name])
    assert round_trip(kv).tobytes() == kv.tobytes()


@pytest.mark.parametrize("name", sorted(KV_DTYPES))
def test_every_special_value_comes_back(name: str) -> None:
    bits = np.array(SPECIAL[name] * 4, f"<u{KV_DTYPES[name].itemsize}").reshape(1, 2, 1, 4, 5)
    kv = bits.view(KV_DTYPES[name])
    assert round_trip(kv).tobytes() == kv.tobytes()


@given(axes=st.permutations(range(5)), reverse=st.booleans(), target=st.permutations(range(5)))
@settings(max_examples=40)
def test_any_strides_are_read_and_written(axes: list[int], reverse: bool, target: list[int]) -> None:
    numbers = np.arange(2 * 2 * 3 * 4 * 5, dtype=np.uint16).reshape(2, 2, 3, 4, 5)
    kv = numbers.transpose(axes)[::-1] if reverse else numbers.transpose(axes)
    shape = kv.shape
    out = np.empty([shape[axis] for axis in target], np.uint16).transpose(np.argsort(target))
    assert out.shape == shape
    CODEC.decode(memoryview(CODEC.encode(kv)), out)
    assert (out == kv).all()


def test_a_part_of_a_larger_array_is_written_and_nothing_beside_it() -> None:
    kv = np.random.default_rng(0).integers(0, 2**16, (2, 2, 3, 4, 8), dtype=np.uint16)
    out = np.full((2, 2, 3, 10, 8), 7, np.uint16)
    CODEC.decode(memoryview(CODEC.encode(kv)), out[:, :, :, 3:7])
    assert (out[:, :, :, 3:7] == kv).all()
    assert (out[:, :, :, :3] == 7).all()
    assert (out[:, :, :, 7:] == 7).all()


def test_numbers_of_like_size_shrink_and_noise_does_not_grow() -> None:
    rng = np.random.default_rng(0)
    floats = rng.standard_normal((4, 2, 2, 64, 64), np.float32)
    bfloat16 = (floats.view(np.uint32) >> 16).astype(np.uint16)
    assert len(CODEC.encode(bfloat16)) < 0.71 * bfloat16.nbytes
    noise = rng.integers(0, 2**16, bfloat16.shape, dtype=np.uint16)
    assert len(CODEC.encode(noise)) <= noise.nbytes + 64


@given(st.binary(max_size=300), st.sampled_from([np.uint16, np.float32]))
def test_foreign_payloads_are_refused(payload: bytes, dtype: type) -> None:
    out: NDArray[Any] = np.zeros((1, 2, 1, 4, 8), dtype)
    with pytest.raises(CodecError):
        CODEC.decode(memoryview(payload), out)


@given(st.data())
def test_changed_payloads_raise_nothing_but_codec_errors(data: st.DataObject) -> None:
    kv = np.zeros((1, 2, 2, 8, 8), np.uint16)
    payload = bytearray(CODEC.encode(kv))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(CodecError):
        CODEC.decode(memoryview(payload), np.zeros_like(kv))


@pytest.mark.parametrize("shape", [(1, 2, 1, 3, 8), (1, 2, 1, 5, 8), (1, 2, 1, 4, 16)])
def test_a_payload_of_another_size_is_refused(shape: tuple[int, ...]) -> None:
    payload = CODEC.encode(np.zeros((1, 2, 1, 4, 8), np.uint16))
    with pytest.raises(CodecError):
        CODEC.decode(memoryview(payload), np.zeros(shape, np.uint16))


@pytest.mark.parametrize("kept", [Kept(), Kept(3, 4), Kept(1000, 1000)])
def test_nothing_changes_with_the_tokens_kept(kept: Kept) -> None:
    kv = np.random.default_rng(0).integers(0, 2**16, (2, 2, 3, 20, 8), dtype=np.uint16)
    assert CODEC.encode(kv, kept, start=7) == CODEC.encode(kv)


def test_tokens_kept_are_never_fewer_than_none() -> None:
    with pytest.raises(ValueError, match="negative"):
        Kept(-1, 0)


def test_an_unknown_codec_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="exact"):
        codec_named("zip")
