"""The native inner loops of the codecs, where there is a compiler.

Arrays of uint16 (bits of bfloat16) and float32 go there, of any strides as long as the numbers of a row lie side by
side. All else is the caller's, in numpy.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from memory.kv.codec.base import CodecError, KVArray
from memory.native import native_library, switched_off

SOURCE = Path(__file__).with_name("codec.cpp")
DTYPES = (np.dtype(np.uint16), np.dtype(np.float32))
BAD = -1


class _View(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("strides", ctypes.c_int64 * 4),
        ("shape", ctypes.c_uint64 * 5),
        ("itemsize", ctypes.c_uint64),
    )


def _library() -> ctypes.CDLL | None:
    # The switch is looked at each time, so that a process can do without from some point on.
    return None if switched_off() or sys.byteorder != "little" else _bound_library()


@cache
def _bound_library() -> ctypes.CDLL | None:
    view = ctypes.POINTER(_View)
    functions: dict[str, list[Any]] = {
        "kv_bound": [view],
        "kv_exact_decode": [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, view],
        "kv_grouped_decode": [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, view],
        "kv_exact_encode": [view, ctypes.c_int, ctypes.c_void_p],
        "kv_grouped_encode": [view, ctypes.c_int, ctypes.c_int, ctypes.c_void_p],
    }
    library = native_library(SOURCE, list(functions))
    if library is None:
        return None
    for name, arguments in functions.items():
        function = getattr(library, name)
        function.restype = ctypes.c_int64
        function.argtypes = arguments
    library.kv_bound.restype = ctypes.c_uint64
    return library


def available(kv: KVArray) -> bool:
    """Whether `kv` may be handed to the functions below. The first call of a machine compiles, for seconds."""
    rows = kv.ndim == 5 and kv.size > 0 and kv.strides[-1] == kv.itemsize
    return rows and kv.dtype in DTYPES and kv.dtype.isnative and _library() is not None


def warm() -> None:
    """Compiles or loads the library now rather than at the first chunk."""
    _library()


def exact_encode(kv: KVArray, per_channel: bool) -> bytes:
    """The table and blobs of `windows.encode`."""
    return _encode("kv_exact_encode", kv, int(per_channel))


def grouped_encode(kv: KVArray, bits: int, per_channel: bool) -> bytes:
    """The table and blobs of `grouped.encode`."""
    return _encode("kv_grouped_encode", kv, bits, int(per_channel))


def exact_decode(data: memoryview, per_channel: bool, out: KVArray) -> None:
    """As `windows.decode`. Raises `CodecError`."""
    _decode("kv_exact_decode", data, int(per_channel), out)


def grouped_decode(data: memoryview, bits: int, out: KVArray) -> None:
    """As `grouped.decode`. Raises `CodecError`."""
    _decode("kv_grouped_decode", data, bits, out)


def _encode(function: str, kv: KVArray, *arguments: int) -> bytes:
    library, view = _library(), _view(kv)
    assert library is not None
    room = np.empty(library.kv_bound(view), np.uint8)
    length = getattr(library, function)(view, *arguments, room.ctypes.data)
    if length < 0:
        raise MemoryError(f"no memory to encode KV of shape {kv.shape}")
    return room[:length].tobytes()


def _decode(function: str, data: memoryview, argument: int, out: KVArray) -> None:
    library = _library()
    assert library is not None
    octets: np.ndarray[Any, Any] = np.frombuffer(data, np.uint8)
    result = getattr(library, function)(octets.ctypes.data, octets.size, argument, _view(out))
    if result == BAD:
        raise CodecError(f"the payload does not hold KV of shape {out.shape} and dtype {out.dtype}")
    if result < 0:
        raise MemoryError(f"no memory to decode KV of shape {out.shape}")


def _view(kv: KVArray) -> _View:
    return _View(kv.ctypes.data, (ctypes.c_int64 * 4)(*kv.strides[:4]), (ctypes.c_uint64 * 5)(*kv.shape), kv.itemsize)
