"""Codecs by name. A file's bytes choose among these and nothing else."""

from __future__ import annotations

from functools import cache

from memory.kv.codec.base import Codec
from memory.kv.codec.exact import ExactCodec

CODECS: dict[str, type[ExactCodec]] = {ExactCodec.name: ExactCodec}


@cache
def codec_named(name: str) -> Codec:
    """The codec of that name. Raises `ValueError`, naming the known ones."""
    try:
        return CODECS[name]()
    except KeyError:
        raise ValueError(f"codec {name!r} is unknown; known are {sorted(CODECS)}") from None
