"""The lossless codec: one plane for each byte of the number, each compressed where that pays.

Keys and values have few different exponents and noise for mantissas. Apart, the exponents shrink to some 37% and
the mantissas, which do not, cost nothing to decode. zstd's level 1 is smaller and faster here than level 3: it
takes fewer of the short matches, which cost more than the literals they replace.

Payload: for each plane, lowest byte first, `method (u8), length (u64)`, then the planes' data one after the other.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import zstandard

from memory.kv.codec.base import NOTHING_KEPT, CodecError, Kept, KVArray, little_endian

RAW, ZSTD = 0, 1
LEVEL = 1
PLANE = struct.Struct("<BQ")
WORTHWHILE = 0.98
"""A plane that shrinks by less is stored as it is: reading 2% more is cheaper than decompressing it."""


class _Contexts(threading.local):
    """zstd's contexts, which threads must not share."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


class ExactCodec:
    """Bit for bit lossless for any dtype, NaN payloads and denormals included."""

    name = "exact"
    fidelity = "exact"

    def __init__(self) -> None:
        self._contexts = _Contexts()

    def encode(self, kv: KVArray, kept: Kept = NOTHING_KEPT, start: int = 0) -> bytes:
        """The payload of `kv`. See `Codec.encode`."""
        flat = np.ascontiguousarray(kv, dtype=little_endian(kv.dtype)).reshape(-1)
        octets = flat.view(np.uint8).reshape(-1, kv.dtype.itemsize)
        table, data = [], []
        for plane in range(kv.dtype.itemsize):
            method, content = self._pack(np.ascontiguousarray(octets[:, plane]))
            table.append(PLANE.pack(method, len(content)))
            data.append(content)
        return b"".join(table + data)

    def _pack(self, plane: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> tuple[int, bytes]:
        packed = self._contexts.compressor.compress(plane.data)
        if len(packed) <= plane.nbytes * WORTHWHILE:
            return ZSTD, packed
        return RAW, plane.tobytes()

    def decode(self, payload: memoryview, out: KVArray, start: int = 0) -> None:
        """Writes the array of `payload` into `out`. See `Codec.decode`."""
        planes = out.dtype.itemsize
        offset = planes * PLANE.size
        if len(payload) < offset:
            raise CodecError(f"payload of {len(payload)} bytes is too short for {planes} planes")
        target = _octets(out)
        for plane in range(planes):
            method, length = PLANE.unpack_from(payload, plane * PLANE.size)
            content = payload[offset : offset + length]
            if len(content) != length:
                raise CodecError(f"plane {plane} ends after {len(content)} of {length} bytes")
            target[..., plane::planes] = self._unpack(method, content, out.size).reshape(out.shape)
            offset += length
        if offset != len(payload):
            raise CodecError(f"{len(payload) - offset} bytes follow the last plane")
        if target.base is None:
            out[...] = target.view(out.dtype)

    def _unpack(self, method: int, content: memoryview, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        if method == RAW:
            plane = np.frombuffer(content, np.uint8)
        elif method == ZSTD:
            try:
                # The size is checked first: a frame must not make us allocate what it claims.
                if zstandard.frame_content_size(content) != size:
                    raise CodecError(f"a plane does not hold {size} bytes")
                plane = np.frombuffer(self._contexts.decompressor.decompress(content), np.uint8)
            except zstandard.ZstdError as error:
                raise CodecError(f"a plane cannot be decompressed: {error}") from error
        else:
            raise CodecError(f"plane method {method} is unknown")
        if plane.size != size:
            raise CodecError(f"a plane holds {plane.size} bytes instead of {size}")
        return plane


def _octets(out: KVArray) -> KVArray:
    """`out` seen as bytes along its last axis, or a new array of that shape where its strides forbid the view."""
    if out.strides[-1] == out.dtype.itemsize and np.little_endian and out.dtype.isnative:
        return out.view(np.uint8)
    return np.empty((*out.shape[:-1], out.shape[-1] * out.dtype.itemsize), np.uint8)
