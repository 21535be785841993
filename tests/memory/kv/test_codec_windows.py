"""Native and Python code write the same bytes and read the same bits, whatever the array and whatever the payload."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memory.kv.codec import native
from memory.kv.codec.base import NOTHING_KEPT, CodecError, Kept
from memory.kv.codec.factory import codec_named

NAMES = ["exact", "int8", "int4"]
DTYPES = [np.uint16, np.float32]
KINDS = ["normal", "channels", "outliers", "zeros", "constant", "denormal", "huge", "noise", "special", "mixed"]


@pytest.fixture(autouse=True, scope="module")
def native_code() -> None:
    """Compares nothing without a compiler."""
    native.warm()
    if not native.available(np.zeros((1, 2, 1, 1, 1), np.uint16)):
        pytest.skip("there is no native code here")


@contextmanager
def python_only() -> Iterator[None]:
    os.environ["KVLOOP_NATIVE"] = "0"
    try:
        yield
    finally:
        del os.environ["KVLOOP_NATIVE"]


def array(kind: str, shape: tuple[int, ...], dtype: Any, seed: int) -> NDArray[Any]:
    """An array of float32, or of the bits of bfloat16, with what the kind says."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(shape).astype(np.float32)
    bits = numbers.view(np.uint32)
    if kind == "outliers":
        numbers *= np.float32(50) ** rng.standard_normal(shape[-1]).astype(np.float32)
        numbers += np.float32(100) * rng.standard_normal(shape[-1]).astype(np.float32)
    elif kind == "channels":
        numbers[..., ::5] *= np.float32(100)
    elif kind == "zeros":
        numbers *= rng.integers(0, 2, shape).astype(np.float32) * np.float32(-1)
    elif kind == "constant":
        numbers[...] = np.float32(rng.standard_normal())
    elif kind == "denormal":
        bits &= 0x807FFFFF
    elif kind == "huge":
        bits[...] = (bits & 0x807FFFFF) | (rng.integers(250, 255, shape, np.uint32) << 23)
    elif kind == "noise":
        bits[...] = rng.integers(0, 2**32, shape, np.uint32)
    if kind in ("special", "mixed"):
        choice = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F810000, 0xFFFFFFFF, 0x80000000, 1], np.uint32)
        places = rng.random(shape) < (0.5 if kind == "special" else 0.02)
        bits[places] = rng.choice(choice, int(places.sum()))
    return (bits >> 16).astype(np.uint16) if dtype == np.uint16 else numbers


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    tokens = draw(st.one_of(st.integers(1, 20), st.integers(1, 20), st.integers(1, 300)))
    dim = draw(st.sampled_from([1, 2, 3, 7, 8, 16, 31, 64, 65, 130]))
    shape = (draw(st.integers(1, 2)), 2, draw(st.integers(1, 2)), tokens, dim)
    kind, dtype = draw(st.sampled_from(KINDS)), draw(st.sampled_from(DTYPES))
    kv = array(kind, shape, dtype, draw(st.integers(0, 2**32)))
    return kv.transpose(0, 1, 3, 2, 4).copy().transpose(0, 1, 3, 2, 4) if draw(st.booleans()) else kv


KEPT = st.builds(Kept, st.integers(0, 40), st.integers(0, 310)) | st.just(NOTHING_KEPT)


@pytest.mark.parametrize("name", NAMES)
@given(kv=arrays(), kept=KEPT)
@settings(max_examples=100, deadline=None)
def test_both_write_the_same_bytes_and_read_the_same_bits(name: str, kv: NDArray[Any], kept: Kept) -> None:
    codec, natively, plainly = codec_named(name), np.empty_like(kv), np.empty_like(kv)
    payload = codec.encode(kv, kept)
    codec.decode(memoryview(payload), natively)
    with python_only():
        assert codec.encode(kv, kept) == payload
        codec.decode(memoryview(payload), plainly)
    assert natively.tobytes() == plainly.tobytes()


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), kv=arrays(), kept=KEPT)
@settings(max_examples=100, deadline=None)
def test_both_refuse_or_read_alike_what_was_damaged(
    name: str, data: st.DataObject, kv: NDArray[Any], kept: Kept
) -> None:
    codec = codec_named(name)
    payload = bytearray(codec.encode(kv, kept))
    how = data.draw(st.sampled_from(["flip", "flip early", "cut", "extend"]))
    if how == "cut":
        del payload[data.draw(st.integers(0, len(payload) - 1)) :]
    elif how == "extend":
        payload += data.draw(st.binary(min_size=1, max_size=40))
    else:
        end = min(len(payload), 80) if how == "flip early" else len(payload)
        for _ in range(data.draw(st.integers(1, 4))):
            payload[data.draw(st.integers(0, end - 1))] ^= data.draw(st.integers(1, 255))
    natively, plainly = read(codec, payload, kv), None
    with python_only():
        plainly = read(codec, payload, kv)
    assert natively == plainly


def read(codec: Any, payload: bytearray, kv: NDArray[Any]) -> bytes | None:
    """What is decoded, or None where the payload is refused; nothing beside the array is written to."""
    frame = np.full((*kv.shape[:3], kv.shape[3] + 2, kv.shape[4]), 7, kv.dtype)
    out = frame[:, :, :, 1:-1]
    try:
        codec.decode(memoryview(payload), out)
    except CodecError:
        return None
    finally:
        assert (frame[:, :, :, [0, -1]] == 7).all()
    return out.tobytes()
