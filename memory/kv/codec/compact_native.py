"""The coder of compact_rans.py, native where there is a compiler; the bytes are the same either way."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory.kv.codec.base import CodecError
from memory.kv.codec.compact_rans import LOWEST, Coded, SymbolModel
from memory.native import native_library, switched_off

SOURCE = Path(__file__).with_name("compact.cpp")


def _library() -> ctypes.CDLL | None:
    return None if switched_off() else _bound_library()


@cache
def _bound_library() -> ctypes.CDLL | None:
    library = native_library(SOURCE, ("compact_decode", "compact_encode"))
    if library is None:
        return None
    size, pointer = ctypes.c_uint64, ctypes.c_void_p
    library.compact_decode.argtypes = [
        pointer, size, pointer, size, pointer, size, pointer, pointer, pointer, size, pointer,
    ]  # fmt: skip
    library.compact_encode.argtypes = [
        pointer, size, size, pointer, pointer, pointer, size, pointer, pointer, pointer, size, ctypes.POINTER(size),
    ]  # fmt: skip
    library.compact_decode.restype = library.compact_encode.restype = ctypes.c_int64
    return library


def encode(model: SymbolModel, numbers: NDArray[np.int32], classes: NDArray[np.uint8]) -> Coded:
    """As `SymbolModel.encode`."""
    library = _library()
    if not numbers.shape[1]:
        return Coded(np.empty(0, np.uint32), np.empty(0, np.uint16), np.empty(0, np.int32))
    if library is None:
        return model.encode(numbers, classes)
    steps, lanes = numbers.shape
    numbers = np.ascontiguousarray(numbers)
    frequency, below = model.by_symbol
    states = np.full(lanes, LOWEST, np.uint32)
    words = np.empty(numbers.size, np.uint16)  # a step emits one word at most
    escaped = ctypes.c_uint64()
    count = library.compact_encode(
        _at(numbers), steps, lanes, _at(classes), _at(frequency), _at(below), frequency.shape[1], _at(model.radius),
        _at(states), _at(words), words.size, ctypes.byref(escaped),
    )  # fmt: skip
    escapes = np.empty(0, np.int32)
    if escaped.value:
        escapes = numbers[np.abs(numbers) > model.radius[classes][:, None]]
    return Coded(states, words[words.size - count :].copy(), escapes)


def decode(model: SymbolModel, coded: Coded, classes: NDArray[np.uint8]) -> NDArray[np.int32]:
    """As `SymbolModel.decode`. Raises `CodecError`."""
    library = _library()
    if library is None:
        return model.decode(coded, classes)
    lanes = coded.states.size
    states = coded.states.copy()
    words = np.concatenate((coded.words, np.zeros(lanes, np.uint16)))
    escapes = np.ascontiguousarray(coded.escapes)
    numbers = np.empty((classes.size, lanes), np.int32)
    result = library.compact_decode(
        _at(states), lanes, _at(words), coded.words.size, _at(classes), classes.size, _at(model.packed),
        _at(model.radius), _at(escapes), escapes.size, _at(numbers),
    )  # fmt: skip
    if result:
        raise CodecError("the coded numbers are not whole")
    return numbers


def _at(array: NDArray[Any]) -> int:
    return array.ctypes.data
