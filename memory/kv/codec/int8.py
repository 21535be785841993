"""int8: half of bfloat16, with an error about as large as bfloat16's own noise. See grouped.py for the format."""

from __future__ import annotations

from memory.kv.codec.lossy import GroupedCodec


class Int8Codec(GroupedCodec):
    """Keys in groups of 256 tokens of a channel, values in groups of 64 channels of a token."""

    def __init__(self) -> None:
        super().__init__("int8", 8)
