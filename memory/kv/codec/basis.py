"""What the compact codec knows of a model before it sees a chunk: means, transforms, steps, distributions, rotation.

A basis is measured once for a model and band (`compact_calibrate`) and never changed: a payload names the digest of
the basis it needs, and the folder keeps every basis that was ever saved. A basis that is lost or damaged means that
its payloads cannot be read, never that they are read wrongly.

All numbers are integers or float32, so that one basis means the same on every CPU.

File `<model digest>-<basis digest>.basis`: `magic (8 bytes), digest (16 bytes), zstd frame`; the digest is BLAKE3 of
the frame's content: the header, the frequencies of the rotation, the mean, then one group after the other, then the
classes' distributions, all little-endian.
"""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from memory.files import write_atomic
from memory.kv.codec.base import CodecError
from memory.kv.codec.compact_rans import SymbolModel

MAGIC = b"KVBASIS1"
DIGEST_BYTES = 16
HEADER = struct.Struct("<5I")
"""Layers, KV heads, head dimension, rotated pairs (0: nothing is rotated), classes."""
GROUP = struct.Struct("<Hhhh")
"""Rank, and the powers of two that inputs, analysis and synthesis are scaled by."""
CLASS = struct.Struct("<BH")
"""Low bits that are coded apart, and entries of the distribution."""
LARGEST_FILE = 1 << 30
RESIDENT_BASES = 8


@dataclass(frozen=True)
class Group:
    """The transform of one layer's keys or values, over all its heads at once: `width` numbers a token.

    Coefficients are `round((x - mean) 2^input_scale @ analysis / 2^(input_scale + analysis_scale))`, and numbers
    `coefficients @ synthesis / 2^synthesis_scale + mean`. `classes` says how each coefficient is distributed.
    """

    input_scale: int
    analysis_scale: int
    synthesis_scale: int
    mean: NDArray[np.float32]
    analysis: NDArray[np.int16]
    synthesis: NDArray[np.int16]
    classes: NDArray[np.uint8]

    @property
    def rank(self) -> int:
        return len(self.classes)

    @cached_property
    def analysis_exact(self) -> NDArray[np.float64]:
        return self.analysis.astype(np.float64)

    @cached_property
    def synthesis_exact(self) -> NDArray[np.float32]:
        return self.synthesis.astype(np.float32)


@dataclass(frozen=True)
class Basis:
    """Groups in the order of layers, keys before values. `turns`: rotation of each pair, 2^-64 turns per position."""

    layers: int
    kv_heads: int
    head_dim: int
    turns: NDArray[np.uint64]
    groups: tuple[Group, ...]
    frequencies: tuple[NDArray[np.uint16], ...]
    low_bits: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, keys and values, heads, dimension: what a chunk must have besides its tokens."""
        return self.layers, 2, self.kv_heads, self.head_dim

    @cached_property
    def model(self) -> SymbolModel:
        """The distributions of the classes, followed by those of low bits: the class after the last has one bit."""
        uniform = [_uniform(bits) for bits in range(1, max(self.low_bits, default=0) + 1)]
        return SymbolModel([*self.frequencies, *uniform])

    @cached_property
    def steps(self) -> NDArray[np.uint8]:
        """The class of each coded step: of each coefficient in order, followed by that of its low bits, if any."""
        steps: list[int] = []
        for group in self.groups:
            for place in group.classes.tolist():
                bits = self.low_bits[place]
                steps += [place] if not bits else [place, len(self.frequencies) + bits - 1]
        return np.array(steps, np.uint8)

    @cached_property
    def rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """The step of each coefficient, the steps of low bits, and each coefficient's number of low bits."""
        bits = np.array([self.low_bits[place] for group in self.groups for place in group.classes.tolist()], np.int32)
        high = np.arange(bits.size) + np.cumsum(bits > 0) - (bits > 0)
        return high, high[bits > 0] + 1, bits

    @cached_property
    def content(self) -> bytes:
        """The file's content before compression."""
        parts = [HEADER.pack(self.layers, self.kv_heads, self.head_dim, len(self.turns), len(self.frequencies))]
        parts.append(self.turns.astype("<u8").tobytes())
        for group in self.groups:
            parts.append(GROUP.pack(group.rank, group.input_scale, group.analysis_scale, group.synthesis_scale))
            parts.append(group.mean.astype("<f4").tobytes())
            parts.append(group.analysis.astype("<i2").tobytes())
            parts.append(group.synthesis.astype("<i2").tobytes())
            parts.append(group.classes.tobytes())
        for bits, each in zip(self.low_bits, self.frequencies, strict=True):
            parts.append(CLASS.pack(bits, each.size) + each.astype("<u2").tobytes())
        return b"".join(parts)

    @cached_property
    def digest(self) -> bytes:
        return blake3(self.content).digest(DIGEST_BYTES)

    def to_bytes(self) -> bytes:
        """The content of a basis file."""
        return MAGIC + self.digest + zstandard.ZstdCompressor(level=9).compress(self.content)

    @classmethod
    def from_bytes(cls, data: bytes) -> Basis:
        """Reads a basis file. Raises `CodecError` for one that is not whole."""
        if data[: len(MAGIC)] != MAGIC:
            raise CodecError("the basis has another format")
        digest, frame = data[len(MAGIC) : len(MAGIC) + DIGEST_BYTES], data[len(MAGIC) + DIGEST_BYTES :]
        try:
            if zstandard.frame_content_size(frame) > LARGEST_FILE:
                raise CodecError("the basis is too large to be one")
            content = zstandard.ZstdDecompressor().decompress(frame)
        except zstandard.ZstdError as error:
            raise CodecError(f"the basis cannot be decompressed: {error}") from error
        if blake3(content).digest(DIGEST_BYTES) != digest:
            raise CodecError("the basis is not the one that its digest names")
        return _Reader(content).basis()


def _uniform(bits: int) -> NDArray[np.uint16]:
    """Frequencies of the numbers 0 ... 2^bits - 1, as far as a class of symmetrical numbers can have them alone."""
    radius = 1 << bits >> 1
    frequencies = np.ones(2 * radius + 2, np.uint16)
    frequencies[:-2] = ((1 << 12) - 2) // (2 * radius)
    frequencies[0] += (1 << 12) - int(frequencies.sum())
    return frequencies


class _Reader:
    """Takes the parts of a basis one after the other."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._offset = 0

    def basis(self) -> Basis:
        layers, kv_heads, head_dim, pairs, classes = self._unpack(HEADER)
        turns = self._array(np.dtype("<u8"), pairs)
        groups = tuple(self._group(kv_heads * head_dim) for _ in range(2 * layers))
        low_bits, frequencies = [], []
        for _ in range(classes):
            bits, size = self._unpack(CLASS)
            low_bits.append(bits)
            frequencies.append(self._array(np.dtype("<u2"), size))
        if self._offset != len(self._content):
            raise CodecError("bytes follow the basis")
        if 2 * pairs not in (0, head_dim) or max(low_bits, default=0) > 7:
            raise CodecError("the basis contradicts itself")
        if any(group.rank and int(group.classes.max()) >= classes for group in groups):
            raise CodecError("the basis names a class that it does not hold")
        return Basis(layers, kv_heads, head_dim, turns, groups, tuple(frequencies), tuple(low_bits))

    def _group(self, width: int) -> Group:
        rank, input_scale, analysis_scale, synthesis_scale = self._unpack(GROUP)
        mean = self._array(np.dtype("<f4"), width)
        analysis = self._array(np.dtype("<i2"), width * rank).reshape(width, rank)
        synthesis = self._array(np.dtype("<i2"), rank * width).reshape(rank, width)
        return Group(
            input_scale, analysis_scale, synthesis_scale, mean, analysis, synthesis, self._array(np.dtype("u1"), rank)
        )

    def _unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self._take(layout.size))

    def _array(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).astype(dtype.newbyteorder("="))

    def _take(self, count: int) -> bytes:
        taken = self._content[self._offset : self._offset + count]
        if len(taken) != count:
            raise CodecError("the basis ends early")
        self._offset += count
        return taken


class BasisFolder:
    """The bases of one store. Safe for threads, and for several processes that calibrate at once."""

    def __init__(self, folder: Path | None) -> None:
        """Without a folder, there are no bases."""
        self._folder = folder
        self._lock = threading.Lock()
        self._resident: dict[bytes, Basis] = {}
        self._newest: dict[bytes, tuple[int, bytes]] = {}

    def put(self, model: bytes, basis: Basis) -> None:
        """Saves the basis that encodes chunks of `model` from now on. Raises `OSError`."""
        if self._folder is None:
            raise FileNotFoundError("there is no folder for bases: open the store with one")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{model.hex()}-{basis.digest.hex()}.basis"
        write_atomic(path, basis.to_bytes(), mode=0o600)

    def of_model(self, model: bytes) -> Basis | None:
        """The basis that was saved last for `model`, or None. One that cannot be read counts as none."""
        if self._folder is None:
            return None
        try:
            paths = list(self._folder.glob(f"{model.hex()}-*.basis"))
            newest = max(paths, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
            return None if newest is None else self.named(bytes.fromhex(newest.stem.split("-")[1]))
        except (OSError, ValueError):  # removed meanwhile, damaged, or not one of ours
            return None

    def named(self, digest: bytes) -> Basis:
        """The basis of that digest. Raises `CodecError` where it is lost or damaged."""
        with self._lock:
            basis = self._resident.get(digest)
            if basis is None:
                basis = self._read(digest)
                while len(self._resident) >= RESIDENT_BASES:
                    del self._resident[next(iter(self._resident))]
                self._resident[digest] = basis
            return basis

    def _read(self, digest: bytes) -> Basis:
        paths = [] if self._folder is None else self._folder.glob(f"*-{digest.hex()}.basis")
        for path in paths:
            try:
                basis = Basis.from_bytes(path.read_bytes())
            except OSError as error:
                raise CodecError(f"the basis {path} cannot be read: {os.strerror(error.errno or 0)}") from error
            if basis.digest != digest:
                raise CodecError(f"the basis {path} holds another one")
            return basis
        raise CodecError(f"the basis {digest.hex()} is lost: what was stored with it has to be computed again")
