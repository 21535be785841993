"""Codecs by name. A file's bytes choose among these and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from memory.kv.codec import native
from memory.kv.codec.base import Codec
from memory.kv.codec.exact import ExactCodec
from memory.kv.codec.int4 import Int4Codec
from memory.kv.codec.int8 import Int8Codec

if TYPE_CHECKING:
    from memory.kv.codec.compact import CompactCodec  # type: ignore[import-not-found,unused-ignore]

CODECS: dict[str, Callable[[], Codec]] = {"exact": ExactCodec, "int8": Int8Codec, "int4": Int4Codec}
COMPACT = "compact"


@cache
def codec_named(name: str) -> Codec:
    """The codec of that name, of those that need no basis. Raises `ValueError`, naming the known ones."""
    try:
        return CODECS[name]()
    except KeyError:
        raise ValueError(f"codec {name!r} is unknown; known are {sorted(CODECS)}") from None


class Codecs:
    """The codecs of one store. Safe for threads."""

    def __init__(self, bases: Path | None = None) -> None:
        """`bases` is the folder of the bases that the compact codec needs; without it there is no compact rung.

        Native code is compiled here, where it is not yet: it must not take the seconds of a request.
        """
        native.warm()
        self._bases = bases
        self._lock = threading.Lock()
        self._compact: CompactCodec | None = None

    def named(self, name: str) -> Codec:
        """The codec that decodes payloads of that name. Raises `ValueError`, naming the known ones."""
        return self._compact_codec() if name == COMPACT else codec_named(name)

    def encoder(self, name: str, identity_model: bytes) -> Codec | None:
        """The codec of that name that encodes KV of this model and band; None where compact has no basis for it."""
        if name != COMPACT:
            return codec_named(name)
        encoder: Codec | None = self._compact_codec().for_model(identity_model)
        return encoder

    def _compact_codec(self) -> CompactCodec:
        # Imported where it is asked for: few processes need it.
        from memory.kv.codec.compact import CompactCodec  # type: ignore[import-not-found,unused-ignore]

        with self._lock:
            if self._compact is None:
                self._compact = CompactCodec(self._bases)
            return self._compact
