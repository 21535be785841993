"""compact: some twelve times smaller than bfloat16. The transform and the steps are measured for the model beforehand.

Keys have their rotation undone; then all heads of a layer's keys, or values, go through one linear transform, which
puts what matters to the next token into few coefficients (`compact_calibrate`). They are rounded, and coded with the
frequencies that were counted for each (`compact_rans`). After KVTC (arXiv 2511.01815), with the transform weighted by
how much the model's output reacts.

Same bits on every CPU: products of matrices have integers as factors, chosen such that every partial sum is an exact
float64 or float32, in whatever order a library adds them. What lies between is single IEEE operations.

What stays outside: the tokens of `Kept.head`, and those that hold a number that the transform cannot express (NaN,
infinity, far beyond what was ever measured), are exact. **The tokens of `Kept.tail` are int4, not exact**: measured on
SmolLM2-135M, 128 exact ones instead diverge 0.001 nats less, as much as bf16's own noise, and make a session of 4,000
tokens a fifth larger; without any tail kept, the divergence doubles.

Payload: see `HEADER`; then the places of the exact tokens (u32 each), their payload, the tail's payload, the lanes'
states (u32 each), the words (u16 each), the numbers without a symbol (i32 each).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory.kv.codec import compact_native
from memory.kv.codec.base import NOTHING_KEPT, CodecError, Kept, KVArray
from memory.kv.codec.basis import DIGEST_BYTES, Basis, BasisFolder, Group
from memory.kv.codec.compact_rans import Coded
from memory.kv.codec.compact_rotation import cos_sin, rotate
from memory.kv.codec.exact import ExactCodec
from memory.kv.codec.int4 import Int4Codec

VERSION = 1
HEADER = struct.Struct(f"<BBxx{DIGEST_BYTES}s8I")
"""Version, dtype, basis; then start, tokens, exact and tail tokens, bytes of both payloads, words, escapes."""
DTYPES: tuple[np.dtype[Any], ...] = (np.dtype(np.uint16), np.dtype(np.float16), np.dtype(np.float32))
LARGEST_INPUT = float(1 << 20)
"""Inputs are integers below this: times int16, 2^17 of them sum to less than 2^53."""
SYNTHESIS_LIMIT = 4095
LARGEST_SUM = 4096
"""What a token's coefficients may sum to: times `SYNTHESIS_LIMIT`, less than 2^24."""
HALF_LARGEST = 65504.0


class CompactCodec:
    """Decodes what any basis of its folder encoded; encodes where it has been given a basis."""

    name = "compact"

    def __init__(self, bases: Path | None, basis: Basis | None = None) -> None:
        self.bases = BasisFolder(bases)
        self._basis = basis
        self._exact = ExactCodec()
        self._tail = Int4Codec()

    @property
    def fidelity(self) -> str:
        """The rung of what is decoded."""
        return self.name

    def for_model(self, model: bytes) -> CompactCodec | None:
        """The codec that encodes chunks of `model`, a `KVIdentity.model_digest`; None where it has no basis yet."""
        basis = self.bases.of_model(model)
        return None if basis is None else self.with_basis(basis)

    def with_basis(self, basis: Basis) -> CompactCodec:
        """A codec that encodes with `basis` and decodes what was encoded with it or with one of the folder."""
        codec = CompactCodec(None, basis)
        codec.bases = self.bases
        return codec

    def encode(self, kv: KVArray, kept: Kept = NOTHING_KEPT, start: int = 0) -> bytes:
        """The payload of `kv`. See `Codec.encode`. Raises `ValueError` where the basis is for KV of another shape."""
        basis = self._basis
        if basis is None or (*kv.shape[:3], kv.shape[4]) != basis.shape or kv.dtype not in DTYPES:
            raise ValueError(f"no basis for KV of shape {kv.shape} and dtype {kv.dtype}: measure the model first")
        first, last = kept.bounds(kv.shape[3])
        with np.errstate(over="ignore", invalid="ignore"):  # tokens with such numbers are told apart
            numbers, expressed = _analyse(kv[:, :, :, first:last], basis, start + first)
        exact = np.concatenate((np.arange(first), first + np.flatnonzero(~expressed))).astype("<u4")
        coded = compact_native.encode(basis.model, numbers, basis.steps)
        exact_payload = self._exact.encode(kv[:, :, :, exact]) if exact.size else b""
        tail = kv[:, :, :, last:]
        tail_payload = self._tail.encode(tail, NOTHING_KEPT, start + last) if tail.shape[3] else b""
        sizes = exact.size, tail.shape[3], len(exact_payload), len(tail_payload), coded.words.size, coded.escapes.size
        header = HEADER.pack(VERSION, DTYPES.index(kv.dtype), basis.digest, start, kv.shape[3], *sizes)
        arrays = coded.states.astype("<u4"), coded.words.astype("<u2"), coded.escapes.astype("<i4")
        return b"".join((header, exact.tobytes(), exact_payload, tail_payload, *(each.tobytes() for each in arrays)))

    def decode(self, payload: memoryview, out: KVArray, start: int = 0) -> None:
        """Writes the array of `payload` into `out`. See `Codec.decode`."""
        parts = _Parts.of(payload, out, start)
        basis = self._basis
        if basis is None or basis.digest != parts.digest:
            basis = self.bases.named(parts.digest)
        if (*out.shape[:3], out.shape[4]) != basis.shape:
            raise CodecError(f"the basis is for KV of another shape than {out.shape}")
        if parts.exact.size:
            exact = np.empty((*out.shape[:3], parts.exact.size, out.shape[4]), out.dtype)
            self._exact.decode(parts.exact_payload, exact)
            out[:, :, :, parts.exact] = exact
        if parts.tail:
            self._tail.decode(parts.tail_payload, out[:, :, :, out.shape[3] - parts.tail :], start)
        if parts.between.size:
            numbers = compact_native.decode(basis.model, parts.coded, basis.steps)
            _synthesise(numbers, basis, parts.between, start, out)


@dataclass(frozen=True)
class _Parts:
    """A payload taken apart, its sizes checked. `between`: the tokens that went through the transform."""

    digest: bytes
    tail: int
    exact: NDArray[np.uint32]
    between: NDArray[np.int64]
    exact_payload: memoryview
    tail_payload: memoryview
    coded: Coded

    @classmethod
    def of(cls, payload: memoryview, out: KVArray, start: int) -> _Parts:
        if len(payload) < HEADER.size:
            raise CodecError(f"payload of {len(payload)} bytes is too short")
        version, dtype, digest, first, tokens, exact, tail, *sizes = HEADER.unpack_from(payload)
        if version != VERSION or dtype >= len(DTYPES) or DTYPES[dtype] != out.dtype:
            raise CodecError(f"payload of version {version} and dtype {dtype}, asked for {out.dtype}")
        if (first, tokens) != (start, out.shape[3]) or exact + tail > tokens:
            raise CodecError(f"payload of {tokens} tokens from {first} on, asked for {out.shape[3]} from {start} on")
        lanes = tokens - exact - tail
        lengths = [4 * exact, sizes[0], sizes[1], 4 * lanes, 2 * sizes[2], 4 * sizes[3]]
        if HEADER.size + sum(lengths) != len(payload):
            raise CodecError(f"payload of {len(payload)} bytes, where its header says {HEADER.size + sum(lengths)}")
        ends = np.cumsum([HEADER.size, *lengths]).tolist()
        pieces = [payload[begin:end] for begin, end in pairwise(ends)]
        places = np.frombuffer(pieces[0], "<u4").astype(np.uint32)
        changed = np.ones(tokens - tail, bool)
        if places.size and (int(places.max()) >= changed.size or (np.diff(places.astype(np.int64)) <= 0).any()):
            raise CodecError("the exact tokens are not within the chunk and in order")
        changed[places] = False
        states, words, escapes = (
            np.frombuffer(piece, kind) for piece, kind in zip(pieces[3:], ("<u4", "<u2", "<i4"), strict=True)
        )
        coded = Coded(states.astype(np.uint32), words.astype(np.uint16), escapes.astype(np.int32))
        return cls(digest, tail, places, np.flatnonzero(changed), pieces[1], pieces[2], coded)


def _analyse(kv: KVArray, basis: Basis, start: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """The rows to code [steps, tokens that can be expressed], and which tokens [tokens] can."""
    tokens = kv.shape[3]
    coefficients = np.empty((sum(group.rank for group in basis.groups), tokens), np.int32)
    expressed = np.ones(tokens, bool)
    angles = cos_sin(basis.turns, start, tokens) if len(basis.turns) else None
    row = 0
    for place, group in enumerate(basis.groups):
        numbers = to_float32(kv[place // 2, place % 2])
        expressed &= np.isfinite(numbers).all(axis=(0, 2))
        if not expressed.all():
            numbers = np.where(expressed[:, None], numbers, np.float32(0))
        if angles is not None and place % 2 == 0:
            numbers = rotate(numbers, angles[0], -angles[1])
        flat = numbers.transpose(1, 0, 2).reshape(tokens, group.mean.size)
        coefficients[row : row + group.rank] = _coefficients(flat, group, expressed).T
        row += group.rank
    return _to_steps(coefficients[:, expressed], basis), expressed


def _coefficients(numbers: NDArray[np.float32], group: Group, expressed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Rounded coefficients [tokens, rank]; marks the tokens whose numbers do not fit in `expressed`."""
    inputs = np.rint(np.ldexp(numbers.astype(np.float64) - group.mean, group.input_scale))
    fits = np.abs(inputs).max(axis=1) < LARGEST_INPUT
    inputs[~fits] = 0.0
    scaled = np.ldexp(inputs @ group.analysis_exact, -group.input_scale - group.analysis_scale)
    coefficients: NDArray[np.float64] = np.floor(scaled + 0.5)
    expressed &= fits & (np.abs(coefficients).sum(axis=1) <= LARGEST_SUM)
    coefficients[~expressed] = 0.0
    return coefficients


def _to_steps(coefficients: NDArray[np.int32], basis: Basis) -> NDArray[np.int32]:
    """The rows to code: each coefficient rounded to its high part, then the rest where its class has some."""
    rows = np.empty((len(basis.steps), coefficients.shape[1]), np.int32)
    high, low, bits = basis.rows
    rows[high] = (coefficients + (1 << bits >> 1)[:, None]) >> bits[:, None]
    split = bits > 0
    rows[low] = coefficients[split] - (rows[high[split]] << bits[split][:, None])
    return rows


def _from_steps(rows: NDArray[np.int32], basis: Basis) -> NDArray[np.int32]:
    high, low, bits = basis.rows
    coefficients = rows[high]
    split = bits > 0
    if split.any():
        coefficients <<= bits[:, None]
        coefficients[split] += rows[low]
    if int(coefficients.min()) < -LARGEST_SUM or int(coefficients.max()) > LARGEST_SUM:
        raise CodecError("a coefficient is larger than any that is written")
    return coefficients


def _synthesise(rows: NDArray[np.int32], basis: Basis, tokens: NDArray[np.int64], start: int, out: KVArray) -> None:
    """Writes what the coded rows stand for to `tokens` of `out`."""
    coefficients = _from_steps(rows, basis).astype(np.float32)
    angles = None
    if len(basis.turns):
        cos, sin = cos_sin(basis.turns, start, out.shape[3])
        angles = cos[tokens], sin[tokens]
    whole = slice(int(tokens[0]), int(tokens[-1]) + 1)
    target: slice | NDArray[np.int64] = whole if whole.stop - whole.start == tokens.size else tokens
    heads, dim = basis.kv_heads, basis.head_dim
    row = 0
    for place, group in enumerate(basis.groups):
        part = coefficients[row : row + group.rank].T @ group.synthesis_exact
        row += group.rank
        part *= np.float32(2.0**-group.synthesis_scale)
        part += group.mean
        numbers: NDArray[np.float32] = part.reshape(tokens.size, heads, dim).transpose(1, 0, 2)
        if angles is not None and place % 2 == 0:
            numbers = rotate(numbers, *angles)
        out[place // 2, place % 2][:, target] = from_float32(numbers, out.dtype)


def to_float32(numbers: KVArray) -> NDArray[np.float32]:
    """The numbers that a KV array's elements stand for: uint16 are the bits of bfloat16."""
    if numbers.dtype == np.uint16:
        return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return numbers.astype(np.float32)


def from_float32(numbers: NDArray[np.float32], dtype: np.dtype[Any]) -> KVArray:
    """Finite numbers as elements of `dtype`, rounded to the nearest, to even."""
    if dtype == np.uint16:
        bits = np.ascontiguousarray(numbers).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF)
        rounded += (bits >> np.uint32(16)) & np.uint32(1)
        return (rounded >> np.uint32(16)).astype(np.uint16)
    if dtype == np.float16:
        return np.clip(numbers, -HALF_LARGEST, HALF_LARGEST).astype(np.float16)
    return numbers
