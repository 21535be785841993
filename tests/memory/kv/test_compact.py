"""The compact codec: the same bits everywhere, errors where they cost least, nothing that cannot be coded is lost."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memory.kv.codec import compact_native
from memory.kv.codec.base import NOTHING_KEPT, CodecError, Kept
from memory.kv.codec.basis import Basis, BasisFolder
from memory.kv.codec.compact import CompactCodec, from_float32, to_float32
from memory.kv.codec.compact_calibrate import Sample, calibrate
from memory.kv.codec.compact_rans import RADIUS_LIMIT, SymbolModel, frequencies_of
from memory.kv.codec.compact_rotation import cos_sin, rotate, turns_of
from memory.kv.codec.factory import Codecs

LAYERS, HEADS, DIM = 2, 2, 8
TURNS = turns_of(1.0 / 10000.0 ** (np.arange(0, DIM, 2) / DIM))
MODEL = bytes(range(16))


def text_like(tokens: int, seed: int, dtype: str = "uint16", start: int = 0) -> NDArray[Any]:
    """KV with few strong directions, rotated keys and a mean, as text has them."""
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(99).standard_normal((LAYERS, 2, HEADS * DIM, HEADS * DIM))
    strengths = 4.0 * 0.6 ** np.arange(HEADS * DIM)
    flat = (rng.standard_normal((LAYERS, 2, tokens, HEADS * DIM)) * strengths) @ mixing + 1.5
    kv = flat.reshape(LAYERS, 2, tokens, HEADS, DIM).transpose(0, 1, 3, 2, 4).astype(np.float32)
    cos, sin = cos_sin(TURNS, start, tokens)
    for layer in range(LAYERS):
        kv[layer, 0] = rotate(kv[layer, 0], cos, sin)
    return from_float32(kv, np.dtype(dtype))


@pytest.fixture(scope="module")
def basis() -> Basis:
    return calibrate([Sample(text_like(600, 1)), Sample(text_like(600, 2, start=600), 600)], None, TURNS, 1.5)


@pytest.fixture(scope="module")
def codec(basis: Basis) -> CompactCodec:
    return CompactCodec(None, basis)


def round_trip(codec: CompactCodec, kv: NDArray[Any], kept: Kept = NOTHING_KEPT, start: int = 0) -> NDArray[Any]:
    out = np.empty(kv.shape, kv.dtype)
    codec.decode(memoryview(codec.encode(kv, kept, start)), out, start)
    return out


def error(found: NDArray[Any], kv: NDArray[Any]) -> float:
    expected = to_float32(kv)
    return float(np.linalg.norm(to_float32(found) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("dtype", ["uint16", "float16", "float32"])
def test_new_text_comes_back_close_and_eight_times_smaller(codec: CompactCodec, dtype: str) -> None:
    kv = text_like(256, 3, dtype, start=256)
    assert error(round_trip(codec, kv, start=256), kv) < 0.2
    assert 2 * kv.size / len(codec.encode(kv, start=256)) > 8


def test_keys_are_coded_as_they_were_before_rotation(codec: CompactCodec) -> None:
    """At a wrong position, the same keys look like nothing that was measured."""
    kv = text_like(256, 3, start=256)
    assert len(codec.encode(kv, start=256)) < 0.95 * len(codec.encode(kv, start=40))
    assert error(round_trip(codec, kv, start=100_000), kv) < 0.6


def test_more_bits_are_less_error() -> None:
    kv, samples = text_like(256, 3), [Sample(text_like(1200, 1))]
    codecs = [CompactCodec(None, calibrate(samples, None, TURNS, bits)) for bits in (0.5, 1.0, 2.0, 4.0)]
    sizes = [len(each.encode(kv)) for each in codecs]
    errors = [error(round_trip(each, kv), kv) for each in codecs]
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.05
    for bits, size in zip((0.5, 1.0, 2.0, 4.0), sizes, strict=True):
        assert size * 8 / kv.size == pytest.approx(bits + 8 * 1100 / kv.size, abs=0.3 * bits)


def test_errors_go_where_the_metric_says_that_they_cost_little() -> None:
    kv = text_like(256, 3)
    metric = np.tile(np.eye(HEADS * DIM), (LAYERS, 2, 1, 1))
    metric[:, :, 0, 0] = 3000.0
    codec = CompactCodec(None, calibrate([Sample(text_like(1200, 1))], metric, TURNS, 1.5))
    values = slice(None), 1, 0, slice(None)
    wrong = np.abs(to_float32(round_trip(codec, kv))[values] - to_float32(kv)[values]).mean(axis=(0, 1))
    assert wrong[0] < 0.5 * wrong[1:].mean()


@given(tokens=st.integers(1, 40), head=st.integers(0, 50), tail=st.integers(0, 50), start=st.integers(0, 2**31))
@settings(max_examples=40)
def test_kept_tokens(codec: CompactCodec, tokens: int, head: int, tail: int, start: int) -> None:
    """The head is exact, the tail is within int4's error, and any numbers of both fit."""
    kv = text_like(tokens, 5, start=start)
    found = round_trip(codec, kv, Kept(head, tail), start)
    first, last = Kept(head, tail).bounds(tokens)
    assert (found[:, :, :, :first] == kv[:, :, :, :first]).all()
    if last < tokens:
        assert error(found[:, :, :, last:], kv[:, :, :, last:]) < 0.12


SPECIAL = {
    "uint16": [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x7F7F, 0xFF7F],
    "float16": [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0x0001],
    "float32": [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7F7FFFFF, 0xFF7FFFFF],
}


@pytest.mark.parametrize("dtype", sorted(SPECIAL))
@given(data=st.data())
@settings(max_examples=30)
def test_tokens_that_cannot_be_expressed_are_exact(codec: CompactCodec, dtype: str, data: st.DataObject) -> None:
    kv = text_like(12, 6, dtype)
    bits = kv.view(f"u{kv.dtype.itemsize}")
    strange = data.draw(st.sets(st.integers(0, 11), max_size=5))
    for token in strange:
        place = data.draw(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, 1), st.integers(0, HEADS - 1)))
        bits[(*place, token, data.draw(st.integers(0, DIM - 1)))] = data.draw(st.sampled_from(SPECIAL[dtype]))
    found = round_trip(codec, kv)
    finite = np.isfinite(to_float32(kv)).all(axis=(0, 1, 2, 4))
    beyond = finite & (np.abs(np.where(np.isfinite(to_float32(kv)), to_float32(kv), 0)).max(axis=(0, 1, 2, 4)) > 1e30)
    exact = ~finite | beyond
    assert found[:, :, :, exact].tobytes() == kv[:, :, :, exact].tobytes()
    assert np.isfinite(to_float32(found[:, :, :, ~exact])).all()


@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 20), dtype=st.sampled_from(sorted(SPECIAL)))
@settings(max_examples=40)
def test_any_bits_can_be_encoded(codec: CompactCodec, seed: int, tokens: int, dtype: str) -> None:
    octets = np.random.default_rng(seed).bytes(LAYERS * 2 * HEADS * tokens * DIM * np.dtype(dtype).itemsize)
    kv: NDArray[Any] = np.frombuffer(octets, dtype).reshape(LAYERS, 2, HEADS, tokens, DIM)
    again = round_trip(codec, kv)
    numbers, found = to_float32(kv), to_float32(again)
    whole = np.isfinite(numbers)
    assert (np.isfinite(found) | ~whole).all()


@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 70), start=st.integers(0, 2**20))
@settings(max_examples=25)
def test_native_and_numpy_agree_to_the_bit(codec: CompactCodec, seed: int, tokens: int, start: int) -> None:
    kv = text_like(tokens, seed, start=start) if seed % 2 else text_like(tokens, seed, start=start) ^ 0x0400
    payload = codec.encode(kv, Kept(2, 3), start)
    native = np.empty_like(kv)
    codec.decode(memoryview(payload), native, start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLOOP_NATIVE", "0")
        assert codec.encode(kv, Kept(2, 3), start) == payload
        numpy = np.empty_like(kv)
        codec.decode(memoryview(payload), numpy, start)
    assert (native == numpy).all()


def test_products_of_matrices_are_exact_in_any_order(codec: CompactCodec, basis: Basis) -> None:
    """The same numbers come out when every sum is taken in float64 or with the terms reversed."""
    kv = text_like(64, 7)
    found = round_trip(codec, kv)
    payload = codec.encode(kv)
    reversed_groups = []
    for group in basis.groups:
        exact = group.synthesis.astype(np.int64)
        assert np.abs(exact).max() <= 4095
        reversed_groups.append(exact)
        coefficients = np.random.default_rng(1).multinomial(4096, np.full(group.rank, 1 / group.rank), 50)
        product = coefficients.astype(np.float32) @ group.synthesis_exact
        assert (product.astype(np.int64) == coefficients @ exact).all()
    again = np.empty_like(kv)
    codec.decode(memoryview(payload), again)
    assert (found == again).all()


def test_bytes_of_a_known_basis_and_chunk_are_known(codec: CompactCodec) -> None:
    """A format that changes unseen would make stored chunks unreadable."""
    from blake3 import blake3

    whole = np.arange(LAYERS * 2 * HEADS * 40 * DIM, dtype=np.int64) * 7919 % 251 - 125
    kv = from_float32((whole / 64).astype(np.float32).reshape(LAYERS, 2, HEADS, 40, DIM), np.dtype("uint16"))
    fixed = Basis.from_bytes((Path(__file__).parent / "data" / "small.basis").read_bytes())
    payload = CompactCodec(None, fixed).encode(kv, Kept(1, 2), 77)
    out = np.empty_like(kv)
    CompactCodec(None, fixed).decode(memoryview(payload), out, 77)
    digests = blake3(payload).hexdigest(8), blake3(out.astype("<u2").tobytes()).hexdigest(8)
    assert digests == tuple((Path(__file__).parent / "data" / "small.digests").read_text().split())


@given(data=st.data())
@settings(max_examples=150)
def test_changed_payloads_raise_nothing_but_codec_errors(codec: CompactCodec, data: st.DataObject) -> None:
    kv = text_like(10, 8)
    payload = bytearray(codec.encode(kv, Kept(1, 2), 5))
    if data.draw(st.booleans()):
        del payload[data.draw(st.integers(0, len(payload) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4))):
        if payload:
            payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    for native in ("1", "0"):
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(CodecError):
            patch.setenv("KVLOOP_NATIVE", native)
            codec.decode(memoryview(payload), np.zeros_like(kv), 5)


@given(st.binary(max_size=300))
def test_foreign_payloads_are_refused(codec: CompactCodec, payload: bytes) -> None:
    with pytest.raises(CodecError):
        codec.decode(memoryview(payload), np.zeros((LAYERS, 2, HEADS, 4, DIM), np.uint16))


def test_payloads_are_refused_where_they_do_not_belong(codec: CompactCodec) -> None:
    kv = text_like(10, 8)
    payload = memoryview(codec.encode(kv, start=5))
    for shape, dtype, start in (
        (kv.shape, np.uint16, 6),
        (kv.shape, np.float16, 5),
        ((LAYERS, 2, HEADS, 11, DIM), np.uint16, 5),
        ((LAYERS + 1, 2, HEADS, 10, DIM), np.uint16, 5),
    ):
        with pytest.raises(CodecError):
            codec.decode(payload, np.zeros(shape, dtype), start)
    with pytest.raises(ValueError, match="measure the model"):
        codec.encode(np.zeros((LAYERS, 2, HEADS, 4, DIM + 2), np.uint16))


def test_any_strides_are_read_and_written(codec: CompactCodec) -> None:
    kv = text_like(20, 9)
    strided = np.ascontiguousarray(kv.transpose(3, 0, 4, 2, 1)).transpose(1, 4, 3, 0, 2)
    assert codec.encode(strided) == codec.encode(kv)
    wide = np.full((LAYERS, 2, HEADS, 30, DIM), 7, np.uint16)
    codec.decode(memoryview(codec.encode(kv)), wide[:, :, :, 3:23])
    assert (wide[:, :, :, 3:23] == round_trip(codec, kv)).all()
    assert (wide[:, :, :, :3] == 7).all()
    assert (wide[:, :, :, 23:] == 7).all()


def test_a_store_finds_bases_by_model_and_by_payload(tmp_path: Path, basis: Basis) -> None:
    kv = text_like(20, 9)
    codecs = Codecs(tmp_path / "bases")
    assert codecs.encoder("compact", MODEL) is None
    folder = BasisFolder(tmp_path / "bases")
    folder.put(MODEL, basis)
    encoder = Codecs(tmp_path / "bases").encoder("compact", MODEL)
    assert encoder is not None
    old = encoder.encode(kv)
    folder.put(MODEL, calibrate([Sample(text_like(600, 11))], None, TURNS, 1.0))
    newer = Codecs(tmp_path / "bases").encoder("compact", MODEL)
    assert newer is not None
    assert len(newer.encode(kv)) < len(old)
    out = np.empty_like(kv)
    Codecs(tmp_path / "bases").named("compact").decode(memoryview(old), out)
    assert (out == round_trip(CompactCodec(None, basis), kv)).all()
    assert codecs.encoder("compact", bytes(16)) is None


def test_a_lost_or_damaged_basis_is_a_refusal(tmp_path: Path, basis: Basis) -> None:
    kv, out = text_like(20, 9), np.zeros((LAYERS, 2, HEADS, 20, DIM), np.uint16)
    payload = memoryview(CompactCodec(None, basis).encode(kv))
    with pytest.raises(CodecError, match="lost"):
        CompactCodec(tmp_path).decode(payload, out)
    with pytest.raises(CodecError, match="lost"):
        CompactCodec(None).decode(payload, out)
    BasisFolder(tmp_path).put(MODEL, basis)
    path = next(tmp_path.glob("*.basis"))
    whole = path.read_bytes()
    expected, unused = round_trip(CompactCodec(None, basis), kv), 0
    for place in [*range(0, 80), len(whole) // 2, len(whole) - 1]:
        changed = bytearray(whole)
        changed[place] ^= 4
        path.write_bytes(changed)
        try:
            CompactCodec(tmp_path).decode(payload, out)
        except CodecError:
            assert CompactCodec(tmp_path).for_model(MODEL) is None
        else:  # a bit that the compression does not use
            assert (out == expected).all()
            unused += 1
    assert unused < 8
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CodecError):
        CompactCodec(tmp_path).decode(payload, out)
    path.write_bytes(whole)
    CompactCodec(tmp_path).decode(payload, out)


def test_a_basis_comes_back_from_its_file(basis: Basis) -> None:
    again = Basis.from_bytes(basis.to_bytes())
    assert again.digest == basis.digest
    kv = text_like(20, 9)
    assert CompactCodec(None, again).encode(kv) == CompactCodec(None, basis).encode(kv)


def test_a_band_without_rotation_has_a_basis_too() -> None:
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((1, 2, 1, 600, 12)).astype(np.float32)
    basis = calibrate([Sample(hidden)], None, np.empty(0, np.uint64), 2.0)
    assert error(round_trip(CompactCodec(None, basis), hidden[:, :, :, :50], start=9), hidden[:, :, :, :50]) < 0.5


def test_constant_kv_can_be_measured_and_coded() -> None:
    kv = np.full((1, 2, 1, 64, 4), 0x3F80, np.uint16)
    basis = calibrate([Sample(kv)], None, np.empty(0, np.uint64), 1.0)
    assert error(round_trip(CompactCodec(None, basis), kv), kv) < 0.01


@given(
    counts=st.lists(st.integers(0, 10**6), min_size=2 * RADIUS_LIMIT + 1, max_size=2 * RADIUS_LIMIT + 1),
    sparse=st.integers(0, 2 * RADIUS_LIMIT),
)
def test_frequencies_always_make_a_class(counts: list[int], sparse: int) -> None:
    several = np.array(counts, float)
    several[:sparse] = 0
    SymbolModel([frequencies_of(several)])


@given(data=st.data())
@settings(max_examples=60)
def test_any_integers_are_coded(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    classes = []
    for spread in (0.1, 1.0, 20.0):
        drawn = np.clip(np.rint(rng.standard_normal(4000) * spread), -RADIUS_LIMIT, RADIUS_LIMIT).astype(int)
        classes.append(frequencies_of(np.bincount(drawn + RADIUS_LIMIT, minlength=2 * RADIUS_LIMIT + 1).astype(float)))
    model = SymbolModel(classes)
    shape = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 9))
    numbers = rng.standard_normal(shape) * data.draw(st.sampled_from([0.0, 0.5, 10.0, 1e6]))
    whole = np.rint(numbers).astype(np.int32)
    steps = rng.integers(0, 3, shape[0]).astype(np.uint8)
    coded = compact_native.encode(model, whole, steps)
    plain = model.encode(whole, steps)
    assert (coded.states == plain.states).all()
    assert coded.words.tolist() == plain.words.tolist()
    assert coded.escapes.tolist() == plain.escapes.tolist()
    assert (compact_native.decode(model, coded, steps) == whole).all()
    assert (model.decode(coded, steps) == whole).all()


def test_coding_comes_near_to_the_entropy() -> None:
    rng = np.random.default_rng(3)
    drawn = np.rint(rng.laplace(0, 0.6, (400, 128))).astype(np.int32)
    counts = np.bincount(np.clip(drawn, -RADIUS_LIMIT, RADIUS_LIMIT).ravel() + RADIUS_LIMIT)
    model = SymbolModel([frequencies_of(np.pad(counts, (0, 2 * RADIUS_LIMIT + 1 - counts.size)).astype(float))])
    shares = counts[counts > 0] / drawn.size
    entropy = float(-(shares * np.log2(shares)).sum())
    coded = model.encode(drawn, np.zeros(400, np.uint8))
    assert (16 * coded.words.size + 32 * coded.escapes.size) / drawn.size < 1.02 * entropy


def test_angles_are_those_of_the_definition() -> None:
    frequencies = 1.0 / 100000.0 ** (np.arange(0, 64, 2) / 64)
    cos, sin = cos_sin(turns_of(frequencies), 5000, 300)
    angles = np.arange(5000, 5300)[:, None] * frequencies
    np.testing.assert_allclose(cos, np.cos(angles), atol=6e-5)
    np.testing.assert_allclose(sin, np.sin(angles), atol=6e-5)
    np.testing.assert_allclose(cos**2 + sin**2, 1.0, atol=1e-6)


def test_rotation_is_undone() -> None:
    numbers = np.random.default_rng(0).standard_normal((2, 50, DIM)).astype(np.float32)
    cos, sin = cos_sin(TURNS, 12345, 50)
    np.testing.assert_allclose(rotate(rotate(numbers, cos, sin), cos, -sin), numbers, atol=1e-6)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_numbers_are_rounded_to_the_nearest_and_ties_to_even(bits: list[int]) -> None:
    numbers = np.array([*bits, 0x3F808000, 0x3F818000, 0xBF808000, 0x3F808001, 0x3F807FFF], np.uint32).view(np.float32)
    numbers = numbers[np.isfinite(numbers) & (np.abs(numbers) < 3e38)]
    rounded = from_float32(numbers, np.dtype(np.uint16))
    assert rounded[-5:].tolist() == [0x3F80, 0x3F82, 0xBF80, 0x3F81, 0x3F80]
    wrong = np.abs(to_float32(rounded).astype(np.float64) - numbers)
    for other in (rounded - 1, rounded + 1):
        neighbour = to_float32(other.astype(np.uint16)).astype(np.float64)
        assert (wrong <= np.where(np.isfinite(neighbour), np.abs(neighbour - numbers), np.inf)).all()
