"""The contract of a codec.

The background writer calls `encode`, the loading threads call `decode`, several at once: a codec keeps no state
that two threads share. The payload is already proven to be what `encode` returned when `decode` sees it; `decode`
still refuses what does not fit, for it writes into memory that others own.

Invariants of every codec:
- The payload of an array, and the array of a payload, are the same bits on every CPU, with and without native code.
- Every array can be encoded. What a lossy codec cannot express, such as NaN, it keeps exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

KVArray = NDArray[Any]


class CodecError(ValueError):
    """The payload is not of this codec, or does not hold an array of the shape and dtype asked for."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens at either end of a chunk that stay exact inside a lossy payload. More than there are means all."""

    head: int = 0
    tail: int = 0

    def __post_init__(self) -> None:
        if self.head < 0 or self.tail < 0:
            raise ValueError(f"tokens kept exact cannot be negative: {self}")

    def bounds(self, tokens: int) -> tuple[int, int]:
        """The half-open range of the tokens that may be changed, in a chunk of so many."""
        head = min(self.head, tokens)
        return head, max(head, tokens - self.tail)


NOTHING_KEPT = Kept()


class Codec(Protocol):
    """Encodes KV arrays `[layers, 2, kv_heads, tokens, head_dim]` of uint16 (bits of bfloat16), float16 or float32."""

    @property
    def name(self) -> str:
        """Written into each file; the factory finds the codec by it. The rung of the fidelity ladder it stands on."""

    def encode(self, kv: KVArray, kept: Kept = NOTHING_KEPT, start: int = 0) -> bytes:
        """The payload. `kv` may have any strides and is not written to; `start` is its first token's position."""

    def decode(self, payload: memoryview, out: KVArray, start: int = 0) -> None:
        """Writes the array into `out`, a writable array of the encoded shape and dtype, of any strides.

        Raises `CodecError`; `out` then holds anything.
        """


def little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """`dtype` with its bytes in the order files have them."""
    return dtype.newbyteorder("<")
