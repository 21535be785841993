"""What int8 and int4 have in common: the tokens kept exactly, and the numbers between them in groups.

Payload: u8 version, u8 bits of a code, two zeros, tokens kept at the head (u32), tokens kept at the tail (u32), bytes
of the exact part (u64); the exact part, a payload of the exact codec with the kept tokens side by side, if there are
any; then what grouped.py writes of the tokens between, if there are any.
"""

from __future__ import annotations

import struct

import numpy as np

from memory.kv.codec import grouped, native, windows
from memory.kv.codec.base import NOTHING_KEPT, CodecError, Kept, KVArray
from memory.kv.codec.exact import ExactCodec

VERSION = 1
START = struct.Struct("<BB2xIIQ")


class GroupedCodec:
    """Codes of `bits` bits with a scale for each group."""

    def __init__(self, name: str, bits: int) -> None:
        self._name = name
        self._bits = bits
        self._exact = ExactCodec()

    @property
    def name(self) -> str:
        """See `Codec.name`."""
        return self._name

    @property
    def fidelity(self) -> str:
        """The rung of what is decoded."""
        return self._name

    def encode(self, kv: KVArray, kept: Kept = NOTHING_KEPT, start: int = 0) -> bytes:
        """The payload of `kv`. See `Codec.encode`."""
        tokens = kv.shape[3]
        first, last = kept.bounds(tokens)
        exact, between = b"", b""
        if last - first < tokens:
            exact = self._exact.encode(np.concatenate((kv[:, :, :, :first], kv[:, :, :, last:]), axis=3))
        middle = kv[:, :, :, first:last]
        if middle.size:
            per_channel = last - first >= windows.PER_CHANNEL_TOKENS
            if native.available(middle):
                between = native.grouped_encode(middle, self._bits, per_channel)
            else:
                between = grouped.encode(middle, self._bits, per_channel)
        return START.pack(VERSION, self._bits, first, tokens - last, len(exact)) + exact + between

    def decode(self, payload: memoryview, out: KVArray, start: int = 0) -> None:
        """Writes the array of `payload` into `out`. See `Codec.decode`."""
        if len(payload) < START.size:
            raise CodecError(f"payload of {len(payload)} bytes is too short")
        version, bits, head, tail, exact_bytes = START.unpack_from(payload)
        tokens = out.shape[3]
        if version != VERSION or bits != self._bits or head + tail > tokens:
            raise CodecError(f"payload of version {version}, {bits} bits and {head} + {tail} tokens kept of {tokens}")
        between = payload[START.size + exact_bytes :]
        self._decode_kept(payload[START.size : START.size + exact_bytes], head, tail, out)
        middle = out[:, :, :, head : tokens - tail]
        if not middle.size:
            if len(between):
                raise CodecError(f"{len(between)} bytes follow the last token")
        elif native.available(middle):
            native.grouped_decode(between, self._bits, middle)
        else:
            grouped.decode(between, self._bits, middle)

    def _decode_kept(self, exact: memoryview, head: int, tail: int, out: KVArray) -> None:
        tokens = out.shape[3]
        if head + tail == 0:
            if len(exact):
                raise CodecError("an exact part without tokens")
            return
        both = np.empty((*out.shape[:3], head + tail, out.shape[4]), out.dtype)
        self._exact.decode(exact, both)
        out[:, :, :, :head] = both[:, :, :, :head]
        out[:, :, :, tokens - tail :] = both[:, :, :, head:]
