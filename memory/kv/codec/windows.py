"""Lossless coding of bfloat16 and float32, head by head: a window of exponents for each channel.

Mantissas are noise and stay as they are. Exponents are few: seven consecutive ones, from a base that each channel
(each head, where tokens are few) chooses for itself, cover 98% of the real ones. So an exponent is 3 bits, which unpack
at the speed of memory; the eighth code is an escape into a list of nibbles, and those have an escape into bytes.

A payload is the lengths of the heads' blobs (u32 each) and the blobs, heads in the order of the array. A blob is
    u8 mode, u8[3] zero, u32 number of nibbles, u32 number of far exponents
and, of `WINDOWED`, with the head's numbers in the order [tokens, channels]:
    bases (u8 each); sign and mantissa (u8 each); of float32 the lower halves (u16 each);
    codes: for each block of 512 numbers three planes of 64 bytes, low bits first: number 64k+j is bit k of byte j
      (the last block of n < 512 numbers: planes of w = n/8 rounded up bytes, number wk+j);
    nibbles, two a byte, low one first, in the order of (byte, bit) within each block; far exponents (u8 each).
`PLAIN`, where that would not be smaller, is sign and mantissa, exponents (u8 each), lower halves.
This file and windows.h give the same bytes.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory.kv.codec.base import CodecError, KVArray

U8 = NDArray[np.uint8]
BLOCK, LANES = 512, 64
WINDOW, ESCAPE = 7, 7
BELOW, ABOVE = 12, 3
FAR = BELOW + ABOVE
PLAIN, WINDOWED = 0, 1
HEAD = struct.Struct("<B3xII")
PER_CHANNEL_TOKENS = 16
"""From so many tokens on, bases of their own for all channels cost less than they save."""


def encode(kv: KVArray, per_channel: bool) -> bytes:
    """Table and blobs of an array [layers, 2, kv_heads, tokens, head_dim] of uint16 or float32."""
    return join_blobs([encode_head(head, per_channel) for head in kv.reshape(-1, *kv.shape[3:])])


def decode(data: memoryview, per_channel: bool, out: KVArray) -> None:
    """Writes what `encode` was given into `out`. Raises `CodecError`."""
    for index, blob in zip(np.ndindex(*out.shape[:3]), split_blobs(data, out), strict=True):
        out[index] = decode_head(blob, per_channel, out.shape[3:], out.dtype)


def join_blobs(blobs: list[bytes]) -> bytes:
    """The blobs behind the table of their lengths."""
    return b"".join([np.array([len(blob) for blob in blobs], "<u4").tobytes(), *blobs])


def split_blobs(data: memoryview, out: KVArray) -> list[memoryview]:
    """One blob for each head of `out`. Raises `CodecError` where they are not all of `data`."""
    heads = out.shape[0] * out.shape[1] * out.shape[2]
    if len(data) < 4 * heads:
        raise CodecError(f"payload of {len(data)} bytes is too short for {heads} heads")
    ends = 4 * heads + np.cumsum(np.frombuffer(data[: 4 * heads], "<u4").astype(np.int64))
    if (int(ends[-1]) if heads else 0) != len(data):
        raise CodecError(f"payload of {len(data)} bytes is not as long as its heads say")
    return [data[start:end] for start, end in zip([4 * heads, *ends[:-1]], ends, strict=True)]


def encode_head(head: KVArray, per_channel: bool) -> bytes:
    """The blob of one head [tokens, head_dim]."""
    bits = np.ascontiguousarray(head).view(f"u{head.itemsize}").reshape(-1)
    upper = (bits >> (8 * head.itemsize - 16)).astype(np.uint16)
    exponents = (upper >> 7 & 0xFF).astype(np.uint8)
    rest = ((upper >> 8 & 0x80) | (upper & 0x7F)).astype(np.uint8).tobytes()
    lower = bits.astype("<u2").tobytes() if head.itemsize == 4 else b""
    bases = _best_bases(exponents.reshape(head.shape) if per_channel else exponents.reshape(-1, 1))
    codes, nibbles, far = _codes(exponents, np.resize(bases, head.shape[1]) if not per_channel else bases)
    if len(bases) + len(codes) + (len(nibbles) + 1) // 2 + len(far) >= len(exponents):
        return b"".join((HEAD.pack(PLAIN, 0, 0), rest, exponents.tobytes(), lower))
    pairs = np.append(nibbles, np.zeros(len(nibbles) % 2, np.uint8)).reshape(-1, 2)
    packed = (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8).tobytes()
    start = HEAD.pack(WINDOWED, len(nibbles), len(far))
    return b"".join((start, bases.tobytes(), rest, lower, codes, packed, far.tobytes()))


def _best_bases(columns: U8) -> U8:
    """For each column the first base whose window covers most of it."""
    count = columns.shape[1]
    counts = np.bincount((columns + 256 * np.arange(count)).reshape(-1), minlength=256 * count).reshape(count, 256)
    sums = np.cumsum(np.pad(counts, ((0, 0), (1, 0))), axis=1)
    bases: U8 = (sums[:, WINDOW:] - sums[:, :-WINDOW]).argmax(axis=1).astype(np.uint8)
    return bases


def _codes(exponents: U8, bases: U8) -> tuple[bytes, U8, U8]:
    """The planes of codes, the nibbles of the escapes (not packed) and the far exponents."""
    base = np.resize(bases, len(exponents))
    codes = np.minimum(exponents - base, ESCAPE).astype(np.uint8)
    planes, escaped = [], []
    for first, last, lanes in _runs(len(exponents)):
        block = _blocked(codes[first:last], lanes)
        planes.append(np.packbits(block[:, None] >> np.arange(3)[:, None, None] & 1, axis=3, bitorder="little"))
        places = _blocked(np.arange(first, last), lanes)
        escaped.append(places[block == ESCAPE])
    escapes = np.concatenate(escaped)
    below = base[escapes].astype(np.int16) - 1 - exponents[escapes]
    above = exponents[escapes].astype(np.int16) - base[escapes] - WINDOW
    nibbles = np.full(len(escapes), FAR, np.uint8)
    near = (below >= 0) & (below < BELOW)
    nibbles[near] = below[near]
    near = (above >= 0) & (above < ABOVE)
    nibbles[near] = BELOW + above[near]
    return b"".join(plane.tobytes() for plane in planes), nibbles, exponents[escapes[nibbles == FAR]]


def _runs(size: int) -> list[tuple[int, int, int]]:
    """(first, last, lanes) of the full blocks together and of the rest."""
    full = size // BLOCK * BLOCK
    runs = [(0, full, LANES), (full, size, -(-(size - full) // 8))]
    return [run for run in runs if run[0] < run[1]]


def _blocked(numbers: NDArray[Any], lanes: int) -> NDArray[Any]:
    """[blocks, lanes, 8]: number k * lanes + j of a block at [j, k]; 0 behind the end."""
    blocks = -(-len(numbers) // (8 * lanes))
    padded = np.append(numbers, np.zeros(blocks * 8 * lanes - len(numbers), numbers.dtype))
    return padded.reshape(blocks, 8, lanes).transpose(0, 2, 1)


def decode_head(blob: memoryview, per_channel: bool, shape: tuple[int, ...], dtype: np.dtype[Any]) -> KVArray:
    """The head [tokens, head_dim] of a blob. Raises `CodecError`."""
    size, columns = shape[0] * shape[1], shape[1] if per_channel else 1
    low_bytes = size * (dtype.itemsize - 2)
    if len(blob) < HEAD.size:
        raise CodecError("a head's blob is too short")
    mode, nibbles, far = HEAD.unpack_from(blob)
    codes = 3 * sum(run[2] * -(-(run[1] - run[0]) // (8 * run[2])) for run in _runs(size))
    sizes = {PLAIN: [size, size, low_bytes], WINDOWED: [columns, size, low_bytes, codes, -(-nibbles // 2), far]}
    if mode not in sizes or HEAD.size + sum(sizes[mode]) != len(blob) or (mode == PLAIN and (nibbles or far)):
        raise CodecError(f"a head of {len(blob)} bytes does not hold {size} numbers")
    ends = HEAD.size + np.cumsum(sizes[mode])
    parts = [np.frombuffer(blob[start:end], np.uint8) for start, end in zip([HEAD.size, *ends[:-1]], ends, strict=True)]
    if mode == PLAIN:
        rest, exponents, lower = parts
    else:
        bases, rest, lower, planes, packed, far_exponents = parts
        list_of_nibbles = np.stack((packed & 15, packed >> 4), axis=1).reshape(-1)[:nibbles]
        exponents = _exponents(planes, np.resize(bases, shape[1]), size, list_of_nibbles, far_exponents)
    upper = ((rest & 0x80).astype(np.uint16) << 8) | (exponents.astype(np.uint16) << 7) | (rest & 0x7F)
    bits = upper if dtype.itemsize == 2 else (upper.astype(np.uint32) << 16) | lower.view("<u2")
    head: KVArray = bits.view(dtype).reshape(shape)
    return head


def _exponents(planes: U8, bases: U8, size: int, nibbles: U8, far: U8) -> U8:
    base = np.resize(bases, size)
    exponents, escaped, start = np.empty(size, np.uint8), [], 0
    for first, last, lanes in _runs(size):
        blocks = -(-(last - first) // (8 * lanes))
        packed = planes[start : start + 3 * blocks * lanes].reshape(blocks, 3, lanes)
        start += packed.size
        bits = np.unpackbits(packed[..., None], axis=3, bitorder="little")
        codes = bits[:, 0] | bits[:, 1] << 1 | bits[:, 2] << 2
        exponents[first:last] = codes.transpose(0, 2, 1).reshape(-1)[: last - first] + base[first:last]
        places = _blocked(np.arange(first, last), lanes)
        escaped.append(places[codes == ESCAPE])
    escapes = np.concatenate(escaped)
    if len(escapes) != len(nibbles) or np.count_nonzero(nibbles == FAR) != len(far):
        raise CodecError("a head has another number of escapes than it says")
    bases_there, steps = base[escapes].astype(np.int16), nibbles.astype(np.int16)
    values = bases_there + np.where(steps < BELOW, -1 - steps, steps + WINDOW - BELOW)
    values = (values & 0xFF).astype(np.uint8)
    values[nibbles == FAR] = far
    exponents[escapes] = values
    return exponents
