"""int8 and int4: how far a number may be from what it was, what is kept exactly, and how small the payload is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memory.kv.codec import native
from memory.kv.codec.base import NOTHING_KEPT, CodecError, Kept
from memory.kv.codec.factory import codec_named

CODES = {"int8": 254, "int4": 15}
DTYPES = ["uint16", "float16", "float32"]


@pytest.fixture(autouse=True, scope="module", params=["native", "python"])
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test here runs twice."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setenv("KVLOOP_NATIVE", "0")
        native.warm()
        yield


def as_kv(numbers: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    return (numbers.view(np.uint32) >> 16).astype(np.uint16) if dtype == "uint16" else numbers.astype(dtype)


def as_numbers(kv: NDArray[Any]) -> NDArray[np.float64]:
    numbers = (kv.astype(np.uint32) << 16).view(np.float32) if kv.dtype == np.uint16 else kv
    with np.errstate(invalid="ignore"):  # signalling NaN become quiet
        return numbers.astype(np.float64)


def keys_and_values(tokens: int = 256, heads: int = 2, seed: int = 0, dim: int = 64) -> NDArray[np.float32]:
    """Keys with large, shifted channels, values with large tokens, as models have them."""
    rng = np.random.default_rng(seed)
    kv = rng.standard_normal((2, 2, heads, tokens, dim)).astype(np.float32)
    kv[:, 0] *= np.float32(2) ** rng.integers(-3, 4, dim).astype(np.float32)
    kv[:, 0] += np.float32(3) * rng.standard_normal(dim).astype(np.float32)
    kv[:, 1] *= np.float32(2) ** rng.integers(-2, 3, (tokens, 1)).astype(np.float32)
    return kv


def round_trip(name: str, kv: NDArray[Any], kept: Kept = NOTHING_KEPT) -> NDArray[Any]:
    out = np.empty_like(kv)
    codec_named(name).decode(memoryview(codec_named(name).encode(kv, kept)), out)
    return out


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_number_is_further_off_than_its_group_allows(name: str, dtype: str) -> None:
    kv = as_kv(keys_and_values(), dtype)
    before, after = as_numbers(kv), as_numbers(round_trip(name, kv))
    for half, axis in ((0, 3), (1, 4)):
        x = before[:, half] if half else before[:, 0].reshape(2, 2, -1, 256 if name == "int8" else 64, 64)
        most = np.abs(x).max(axis=-1 if half else -2, keepdims=True)
        reach = np.maximum(x.max(axis=-1 if half else -2, keepdims=True), 0) - np.minimum(
            x.min(axis=-1 if half else -2, keepdims=True), 0
        )
        # Half a step, a step rounded up to its scale, a code at the edge, and the rounding to the dtype.
        step = 2 * most / 254 if name == "int8" else np.maximum(reach / 15, 2 * most / 18)
        error = np.abs(after[:, half].reshape(x.shape) - x)
        assert (error <= step * 0.5 * 1.13 + most / 256).all(), (half, axis, float((error / step).max()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_an_order_closer_than_int4(dtype: str) -> None:
    kv = as_kv(keys_and_values(), dtype)
    errors = {name: np.abs(as_numbers(round_trip(name, kv)) - as_numbers(kv)).mean() for name in CODES}
    assert errors["int4"] > 5 * errors["int8"] > 0


def test_shifted_channels_cost_int4_keys_no_accuracy() -> None:
    kv = keys_and_values()
    shifted = kv.copy()
    shifted[:, 0] += np.float32(8)
    near, far = (as_numbers(round_trip("int4", x)[:, 0]) - x[:, 0] for x in (kv, shifted))
    assert np.abs(far).mean() < 1.3 * np.abs(near).mean()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_values_with_large_channels_are_coded_like_keys(name: str) -> None:
    """The residual stream has such channels; coded with them, all others of a token would be lost."""
    kv = keys_and_values(seed=3)
    kv[:, 1, :, :, 17] *= np.float32(200)
    before = as_kv(kv, "uint16")
    error = np.abs(as_numbers(round_trip(name, before)) - as_numbers(before))[:, 1]
    others = np.delete(error, 17, axis=-1).mean()
    plain = as_kv(keys_and_values(seed=3), "uint16")
    assert others < 4 * np.abs(as_numbers(round_trip(name, plain)) - as_numbers(plain))[:, 1].mean()


@pytest.mark.parametrize(("name", "least"), [("int8", 1.95), ("int4", 3.6)])
def test_a_chunk_takes_what_its_rung_promises(name: str, least: float) -> None:
    kv = as_kv(keys_and_values(heads=3), "uint16")
    assert kv.nbytes / len(codec_named(name).encode(kv)) > least


@pytest.mark.parametrize("name", ["int8", "int4"])
@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(1, 90),
    kept=st.builds(Kept, st.integers(0, 100), st.integers(0, 100)),
)
@settings(max_examples=60, deadline=None)
def test_tokens_kept_come_back_bit_for_bit(name: str, dtype: str, tokens: int, kept: Kept) -> None:
    kv = as_kv(keys_and_values(tokens, dim=5), dtype)
    out = round_trip(name, kv, kept)
    assert out[:, :, :, : kept.head].tobytes() == kv[:, :, :, : kept.head].tobytes()
    tail = max(0, tokens - kept.tail)
    assert out[:, :, :, tail:].tobytes() == kv[:, :, :, tail:].tobytes()
    if kept.head + kept.tail < tokens // 2:
        assert out.tobytes() != kv.tobytes()


SPECIAL = {
    "uint16": [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7F7F, 0xFF7F],
    "float16": [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0x7BFF, 0xFBFF],
    "float32": [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF, 0xFF7FFFFF],
}


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_has_no_code_comes_back_bit_for_bit_and_harms_nothing_beside_it(name: str, dtype: str) -> None:
    plain = as_kv(keys_and_values(), dtype)
    kv = plain.copy()
    bits = kv.view(f"u{kv.itemsize}").reshape(-1)
    places = np.random.default_rng(1).choice(bits.size, 200, replace=False)
    bits[places] = np.resize(SPECIAL[dtype], 200)
    out = round_trip(name, kv)
    same = out.view(bits.dtype).reshape(-1)
    assert (same[places] == bits[places]).all()
    others = np.delete(as_numbers(out), places) - np.delete(as_numbers(plain), places)
    limit = np.abs(as_numbers(round_trip(name, plain)) - as_numbers(plain)).max()
    assert np.abs(others).max() <= 1.3 * limit


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_without_any_codes_is_exact_and_not_much_larger(name: str, dtype: str) -> None:
    kv = np.resize(np.array(SPECIAL[dtype], f"u{np.dtype(dtype).itemsize}"), (1, 2, 2, 40, 8)).view(dtype)
    assert round_trip(name, kv).tobytes() == kv.tobytes()
    assert len(codec_named(name).encode(kv)) < 1.1 * kv.nbytes + 200


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_never_become_infinite(name: str, dtype: str) -> None:
    largest = {"uint16": 2.0**126, "float32": 2.0**126, "float16": 2.0**14}[dtype]
    numbers = keys_and_values()
    kv = as_kv((numbers / np.abs(numbers).max() * np.float32(largest)).astype(np.float32), dtype)
    assert np.isfinite(as_numbers(round_trip(name, kv))).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_zeros_and_constants_stay_what_they_are(name: str) -> None:
    zeros = np.zeros((1, 2, 1, 70, 64), np.uint16)
    assert round_trip(name, zeros).tobytes() == zeros.tobytes()
    ones = as_kv(np.ones((1, 2, 1, 70, 64), np.float32), "uint16")
    assert np.abs(as_numbers(round_trip(name, ones)) - 1).max() < 0.07


def test_the_codes_of_int4_lie_as_the_format_says() -> None:
    """Attention may read them as they are, so where they lie is a promise."""
    kv = as_kv(keys_and_values(tokens=64, heads=1), "uint16")
    payload = np.frombuffer(codec_named("int4").encode(kv), np.uint8)
    lengths = payload[20:36].copy().view("<u4")
    blob = payload[36 : 36 + lengths[0]]
    base = int(blob[2:4].copy().view("<u2")[0])
    scale = ((blob[8:72].astype(np.uint32) + base) << 19).view(np.float32)
    zero = blob[72:136].view(np.int8).astype(np.float32) - 8
    rows = blob[136 : 136 + 64 * 32].reshape(64, 32)
    codes = np.concatenate((rows & 15, rows >> 4), axis=1).astype(np.float32)
    numbers = ((codes + zero) * scale).astype(np.float32)
    assert np.abs(numbers - as_numbers(round_trip("int4", kv)[0, 0, 0])).max() <= np.abs(numbers).max() / 256


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_payload_of_another_codec_or_shape_is_refused(name: str) -> None:
    kv = as_kv(keys_and_values(tokens=40), "uint16")
    payload = memoryview(codec_named(name).encode(kv, Kept(2, 2)))
    for other in {"exact", "int8", "int4"} - {name}:
        with pytest.raises(CodecError):
            codec_named(other).decode(payload, np.empty_like(kv))
    for shape in ((2, 2, 2, 39, 64), (2, 2, 2, 41, 64), (2, 2, 2, 40, 63), (1, 2, 2, 40, 64)):
        with pytest.raises(CodecError):
            codec_named(name).decode(payload, np.empty(shape, np.uint16))


PAYLOADS = {"exact": "43b437556d8756b9", "int4": "59f636c20612ea25", "int8": "32d457540de7991c"}


@pytest.mark.parametrize("name", sorted(PAYLOADS))
def test_the_payload_of_a_known_array_is_known(name: str) -> None:
    """Files outlive programs: a change of these bytes needs another version in the payload."""
    numbers = (np.arange(2 * 2 * 150 * 80, dtype=np.int64) * 2654435761 % 1000003).reshape(1, 2, 2, 150, 80)
    kv = as_kv(((numbers % 4001 - 2000) / (1 + numbers % 97)).astype(np.float32), "uint16")
    payload = codec_named(name).encode(kv, Kept(3, 20))
    assert blake3(payload).hexdigest(8) == PAYLOADS[name]
