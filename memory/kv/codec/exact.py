"""The lossless codec.

bfloat16 and float32 are coded by windows of exponents (windows.py): 1.44 times smaller on real KV, decoded faster than
memory delivers it. Other dtypes are split into one plane for each byte of the number, and each plane is compressed by
zstd where that pays. What does not shrink is stored as it is.

Payload: method (u8), whether each channel has bases of its own (u8), two zeros, then what the method says.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import zstandard

from memory.kv.codec import native, windows
from memory.kv.codec.base import NOTHING_KEPT, CodecError, Kept, KVArray, little_endian

RAW, PLANES, WINDOWS = 0, 1, 2
START = struct.Struct("<BB2x")
WINDOWED_DTYPES = (np.dtype(np.uint16), np.dtype(np.float32))
LEVEL = 1
PLANE = struct.Struct("<BQ")
STORED, ZSTD = 0, 1
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
        per_channel = kv.shape[3] >= windows.PER_CHANNEL_TOKENS
        if not kv.size:
            method, content = RAW, b""
        elif native.available(kv):
            method, content = WINDOWS, native.exact_encode(kv, per_channel)
        elif kv.dtype in WINDOWED_DTYPES:
            method, content = WINDOWS, windows.encode(kv, per_channel)
        else:
            method, content = PLANES, self._encode_planes(kv)
        if len(content) >= kv.nbytes:
            method, content = RAW, np.ascontiguousarray(kv, dtype=little_endian(kv.dtype)).tobytes()
        return START.pack(method, method == WINDOWS and per_channel) + content

    def decode(self, payload: memoryview, out: KVArray, start: int = 0) -> None:
        """Writes the array of `payload` into `out`. See `Codec.decode`."""
        if len(payload) < START.size:
            raise CodecError(f"payload of {len(payload)} bytes is too short")
        method, per_channel = START.unpack_from(payload)
        content = payload[START.size :]
        if method == WINDOWS and out.dtype in WINDOWED_DTYPES and out.size:
            if native.available(out):
                native.exact_decode(content, bool(per_channel), out)
            else:
                windows.decode(content, bool(per_channel), out)
        elif method == PLANES:
            self._decode_planes(content, out)
        elif method == RAW and len(content) == out.nbytes:
            out[...] = np.frombuffer(content, little_endian(out.dtype)).reshape(out.shape)
        else:
            raise CodecError(f"method {method} with {len(content)} bytes does not hold {out.nbytes} of {out.dtype}")

    def _encode_planes(self, kv: KVArray) -> bytes:
        flat = np.ascontiguousarray(kv, dtype=little_endian(kv.dtype)).reshape(-1)
        octets = flat.view(np.uint8).reshape(-1, kv.dtype.itemsize)
        table, data = [], []
        for plane in range(kv.dtype.itemsize):
            method, content = self._pack(np.ascontiguousarray(octets[:, plane]))
            table.append(PLANE.pack(method, len(content)))
            data.append(content)
        return b"".join(table + data)

    def _pack(self, plane: windows.U8) -> tuple[int, bytes]:
        packed = self._contexts.compressor.compress(plane.data)
        if len(packed) <= plane.nbytes * WORTHWHILE:
            return ZSTD, packed
        return STORED, plane.tobytes()

    def _decode_planes(self, content: memoryview, out: KVArray) -> None:
        planes = out.dtype.itemsize
        offset = planes * PLANE.size
        if len(content) < offset:
            raise CodecError(f"payload of {len(content)} bytes is too short for {planes} planes")
        octets = np.empty((out.size, planes), np.uint8)
        for plane in range(planes):
            method, length = PLANE.unpack_from(content, plane * PLANE.size)
            octets[:, plane] = self._unpack(method, content[offset : offset + length], out.size)
            offset += length
        if offset != len(content):
            raise CodecError(f"the planes take {offset} bytes, the payload has {len(content)}")
        out[...] = octets.reshape(-1).view(little_endian(out.dtype)).reshape(out.shape)

    def _unpack(self, method: int, content: memoryview, size: int) -> windows.U8:
        if method == STORED:
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
