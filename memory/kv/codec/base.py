"""The contract of a codec.

The background writer calls `encode`, the loading threads call `decode`, several at once: a codec keeps no state
that two threads share. The payload is already proven to be what `encode` returned when `decode` sees it; `decode`
still refuses what does not fit, for it writes into memory that others own.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

KVArray = NDArray[Any]


class CodecError(ValueError):
    """The payload is not of this codec, or does not hold an array of the shape and dtype asked for."""


class Codec(Protocol):
    """Encodes KV arrays `[layers, 2, kv_heads, tokens, head_dim]` of uint16, float16 or float32."""

    @property
    def name(self) -> str:
        """Written into each file; the factory finds the codec by it."""

    @property
    def fidelity(self) -> str:
        """ "exact", or how a chunk that went through this codec differs from what was computed."""

    def encode(self, kv: KVArray) -> bytes:
        """The payload. `kv` may have any strides and is not written to."""

    def decode(self, payload: memoryview, out: KVArray) -> None:
        """Writes the array into `out`, a writable array of the encoded shape and dtype, of any strides.

        Raises `CodecError`; `out` then holds anything.
        """


def little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """`dtype` with its bytes in the order files have them."""
    return dtype.newbyteorder("<")
