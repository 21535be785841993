"""int8 and int4 coding of KV: keys in groups along tokens, values in groups along channels.

Keys have channels that are large in every token, values have tokens that are large in every channel; each is grouped so
that what is large shares a scale with its like. Values that have large channels instead are grouped like keys. A number
is `(code + zero) * scale` in fp32, rounded to its dtype. A scale is a float with a mantissa of 3 or 4 bits, so the
product is exact, and every CPU, order of operations and kernel gives the same bits.

A payload is the lengths of the heads' blobs (u32 each) and the blobs, heads in the order of the array. A blob is
    u8 mode, u8 flag, u16 base of the scales, u32 number of escapes
and, of `EXACT`, where too much cannot be coded, a blob of windows.py with bases for each channel if the flag says so;
of `GROUPED`, in groups along tokens if the flag says so, else along channels, all in the order [tokens, channels]:
    int8: scale (u8) of each group; codes (i8). The zero is 0. Groups are 256 tokens or 64 channels long.
    int4 along tokens: scale (u8) of each group, zero + 8 (i8) of each group; codes. Groups are 64 long.
    int4 along channels: scale * 4 + zero + 9 (u8) of each group, scale in 6 bits; codes. Groups are 64 long.
    (The last group of a row or column takes what is left; it is up to twice as long.)
    then places (u32 each) and bits of the escapes: numbers of 2^126 and more, infinities and NaN are kept exactly.
A scale is the float of the bits `(base + scale) << 19`, or `<< 20` of int4 along channels. int4 codes of a row of n
channels take (n + 1) / 2 bytes: channel j is the low half of byte j, channel (n + 1) / 2 + j the high half.
This file and grouped.h give the same bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory.kv.codec import windows
from memory.kv.codec.base import CodecError, KVArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
GROUP = 64
ESCAPE_SHARE = 8
GROUPED, EXACT = 0, 1
HEAD = struct.Struct("<BBHI")
LIMITS = {"uint16": np.float32(2.0**126), "float32": np.float32(2.0**126), "float16": np.float32(2.0**14)}
"""Numbers from here on are kept exactly: one that is rounded up must not become infinite."""


@dataclass(frozen=True, slots=True)
class Coding:
    """How a head is coded."""

    channels: bool
    """Whether a group is a channel of consecutive tokens, or a token's consecutive channels."""
    bits: int

    @property
    def zeros(self) -> bool:
        """Whether groups have a zero in a byte of its own."""
        return self.channels and self.bits == 4

    @property
    def coarse(self) -> bool:
        """Whether a group's scale and zero share a byte."""
        return not self.channels and self.bits == 4

    @property
    def axis(self) -> int:
        """The axis of [tokens, channels] that groups lie along."""
        return 0 if self.channels else 1

    @property
    def shift(self) -> int:
        return 20 if self.coarse else 19

    @property
    def codes(self) -> int:
        """The largest scale, counted from the base."""
        return 63 if self.coarse else 255

    @property
    def floor(self) -> int:
        """The least base: scales below 2^-118 would make denormals of the codes."""
        return 9 << (23 - self.shift)

    @property
    def top(self) -> int:
        """No scale is larger, so all are finite."""
        return 254 << (23 - self.shift)

    def row_bytes(self, dim: int) -> int:
        return dim if self.bits == 8 else (dim + 1) // 2

    def starts(self, tokens: int, dim: int) -> NDArray[np.intp]:
        """Where the groups start, along the axis they lie on."""
        group = 4 * GROUP if self.channels and self.bits == 8 else GROUP
        return np.arange(max(1, (tokens if self.channels else dim) // group)) * group


@dataclass(frozen=True, slots=True)
class _Groups:
    """Every group's range, and the scale it will have."""

    coding: Coding
    starts: NDArray[np.intp]
    low: F32
    high: F32
    chosen: NDArray[np.int64]
    base: int
    scale: NDArray[np.int64]

    @classmethod
    def of(cls, x: F32, coding: Coding) -> _Groups:
        starts = coding.starts(*x.shape)
        low = np.minimum.reduceat(x, starts, axis=coding.axis)
        high = np.maximum.reduceat(x, starts, axis=coding.axis)
        step, chosen = _step(coding, low, high)
        scale = ((step.view(np.uint32) + np.uint32((1 << coding.shift) - 1)) >> coding.shift).astype(np.int64)
        base = max(int(scale.max()) - coding.codes, coding.floor)
        return cls(coding, starts, low, high, chosen, base, np.maximum(scale, base))

    @classmethod
    def best(cls, x: F32, bits: int, keys: bool) -> _Groups:
        """Groups along tokens for keys; for values only where that makes scales smaller, on average.

        By an octave in int4, where such groups take more room than groups along channels; in int8 they take less.
        """
        channels = cls.of(x, Coding(True, bits))
        if keys:
            return channels
        tokens = cls.of(x, Coding(False, bits))
        least, fine = (16, 2) if bits == 4 else (0, 1)  # in sixteenths of an octave
        gain = fine * int(tokens.scale.sum()) * channels.scale.size - int(channels.scale.sum()) * tokens.scale.size
        worth = x.shape[0] >= GROUP and gain > least * channels.scale.size * tokens.scale.size
        return channels if worth else tokens


def encode(kv: KVArray, bits: int, per_channel: bool) -> bytes:
    """Table and blobs of an array [layers, 2, kv_heads, tokens, head_dim]."""
    heads = ((np.ascontiguousarray(kv[index]), index[1] == 0) for index in np.ndindex(*kv.shape[:3]))
    return windows.join_blobs([encode_head(head, keys, bits, per_channel) for head, keys in heads])


def decode(data: memoryview, bits: int, out: KVArray) -> None:
    """Writes the array of table and blobs into `out`. Raises `CodecError`."""
    for index, blob in zip(np.ndindex(*out.shape[:3]), windows.split_blobs(data, out), strict=True):
        out[index] = decode_head(blob, bits, out.shape[3:], out.dtype)


def encode_head(head: KVArray, keys: bool, bits: int, per_channel: bool) -> bytes:
    """The blob of one head [tokens, head_dim]."""
    numbers = to_float(head)
    with np.errstate(invalid="ignore"):
        escaped = ~(np.abs(numbers) < LIMITS[head.dtype.name])
    places = np.flatnonzero(escaped)
    if len(places) * ESCAPE_SHARE > head.size:
        return HEAD.pack(EXACT, per_channel, 0, 0) + _exact_blob(head, per_channel)
    x = np.where(escaped, np.float32(0), numbers) + np.float32(0)  # -0 becomes 0, so that minima have one value
    groups = _Groups.best(x, bits, keys)
    coding, scale = groups.coding, groups.scale - groups.base
    inverse = np.float32(1) / _scales(groups.base, scale, coding)
    parameters, offset = [scale.astype(np.uint8)], np.zeros_like(inverse)
    if coding.coarse:
        parameters = [(scale << 2 | groups.chosen).astype(np.uint8)]
        offset = groups.chosen.astype(np.float32) - np.float32(9)
    elif coding.zeros:
        middle = groups.low * np.float32(0.5) + groups.high * np.float32(0.5)
        zero = np.clip(np.rint(middle * inverse - np.float32(7.5)) + np.float32(8), -128, 127).astype(np.float32)
        parameters.append(zero.astype(np.int8).view(np.uint8))
        offset = zero - np.float32(8)
    lengths = np.diff(np.append(groups.starts, head.shape[coding.axis]))
    rounded = np.rint(x * np.repeat(inverse, lengths, coding.axis)) - np.repeat(offset, lengths, coding.axis)
    if bits == 8:
        codes = np.clip(rounded, -127, 127).astype(np.int8).view(np.uint8)
    else:
        codes = _pack(np.clip(rounded, 0, 15).astype(np.uint8))
    kept = head.reshape(-1)[places].astype(head.dtype.newbyteorder("<")).tobytes()
    start = HEAD.pack(GROUPED, coding.channels, groups.base, len(places))
    return b"".join((start, *(p.tobytes() for p in parameters), codes.tobytes(), places.astype("<u4").tobytes(), kept))


def decode_head(blob: memoryview, bits: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> KVArray:
    """The head [tokens, head_dim] of a blob. Raises `CodecError`."""
    if len(blob) < HEAD.size:
        raise CodecError("a head's blob is too short")
    mode, flag, base, count = HEAD.unpack_from(blob)
    if mode == EXACT:
        return _exact_head(blob[HEAD.size :], bool(flag), shape, dtype)
    tokens, dim = shape
    coding = Coding(bool(flag), bits)
    starts = coding.starts(tokens, dim)
    groups = (len(starts), dim) if coding.channels else (tokens, len(starts))
    code_bytes, parameters = tokens * coding.row_bytes(dim), groups[0] * groups[1]
    sizes = [parameters, parameters if coding.zeros else 0, code_bytes, 4 * count, count * dtype.itemsize]
    if mode != GROUPED or base + coding.codes > coding.top or HEAD.size + sum(sizes) != len(blob):
        raise CodecError(f"a head of {len(blob)} bytes does not hold {tokens * dim} numbers")
    ends = HEAD.size + np.cumsum(sizes)
    scale, zero, codes, places, kept = (
        np.frombuffer(blob[start:end], np.uint8) for start, end in zip([HEAD.size, *ends[:-1]], ends, strict=True)
    )
    offset: F32 = np.zeros(scale.size, np.float32)
    if coding.coarse:
        offset, scale = (scale & 3).astype(np.float32) - np.float32(9), (scale >> 2).astype(np.uint8)
    elif coding.zeros:
        offset = zero.view(np.int8).astype(np.float32) - np.float32(8)
    lengths = np.diff(np.append(starts, shape[coding.axis]))
    scales = np.repeat(_scales(base, scale, coding).reshape(groups), lengths, coding.axis)
    rows = codes.reshape(tokens, -1)
    numbers = (rows.view(np.int8) if bits == 8 else _unpack(rows, dim)).astype(np.float32)
    with np.errstate(over="ignore"):
        head = from_float((numbers + np.repeat(offset.reshape(groups), lengths, coding.axis)) * scales, dtype)
    where = places.view("<u4")
    if count and int(where.max()) >= head.size:
        raise CodecError("an escape lies outside its head")
    head.reshape(-1)[where] = kept.view(dtype.newbyteorder("<"))
    return head


def to_float(head: KVArray) -> F32:
    """The numbers of an array as float32. Its values must not be written to."""
    if head.dtype == np.uint16:
        return (head.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaN of float16 become quiet; they are not coded
        return head.astype(np.float32, copy=False)


def from_float(numbers: F32, dtype: np.dtype[Any]) -> KVArray:
    """Rounds finite numbers to a dtype: to nearest, ties to even."""
    if dtype == np.uint16:
        bits = numbers.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return numbers.astype(dtype, copy=False)


def _step(coding: Coding, low: F32, high: F32) -> tuple[F32, NDArray[np.int64]]:
    """The step that each group needs, and of int4 values which of the four zeros makes it smallest."""
    one = np.float32(1)
    far = np.maximum(np.abs(low), np.abs(high))
    if coding.bits == 8:
        return far * (one / np.float32(127)), np.zeros(low.shape, np.int64)
    if coding.channels:
        step = np.maximum((high - low) * (one / np.float32(15)), far * (one / np.float32(130)))
        return step, np.zeros(low.shape, np.int64)
    zero = np.float32(0)  # added, it makes 0 of -0, whose bits would be a scale
    steps = np.stack([
        np.maximum(np.maximum(low * (-one / np.float32(9 - z)), high * (one / np.float32(6 + z))), zero) + zero
        for z in range(4)
    ])  # fmt: skip
    chosen = steps.argmin(axis=0)
    return np.take_along_axis(steps, chosen[None], axis=0)[0], chosen


def _scales(base: int, scale: NDArray[Any], coding: Coding) -> F32:
    return ((scale.astype(np.uint32) + np.uint32(base)) << coding.shift).view(np.float32)


def _pack(codes: U8) -> U8:
    half = (codes.shape[1] + 1) // 2
    packed = codes[:, :half].copy()
    packed[:, : codes.shape[1] - half] |= codes[:, half:] << 4
    return packed


def _unpack(rows: U8, dim: int) -> U8:
    return np.concatenate((rows & 15, rows >> 4), axis=1)[:, :dim]


def _exact_blob(head: KVArray, per_channel: bool) -> bytes:
    if head.dtype == np.float16:
        return head.astype("<f2", copy=False).tobytes()
    return windows.encode_head(head, per_channel)


def _exact_head(blob: memoryview, per_channel: bool, shape: tuple[int, ...], dtype: np.dtype[Any]) -> KVArray:
    if dtype != np.float16:
        return windows.decode_head(blob, per_channel, shape, dtype)
    if len(blob) != 2 * shape[0] * shape[1]:
        raise CodecError("a head kept exactly has another size")
    return np.frombuffer(blob, "<f2").reshape(shape)
