"""Token ids to text, a few at a time. What was given out once never changes, and a character is given out whole.

`ByteLevelDecoder` is exact for byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2): a token is a run of bytes, and UTF-8
is decoded as it arrives. `WindowDecoder` works for any tokenizer (Llama 2, Mistral): it decodes a short window of ids
twice and gives out the difference. Both skip special tokens, as `Tokenizer.decode(skip_special_tokens=True)` does.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """Turns the ids of one choice into text. One instance per choice; not thread-safe."""

    @property
    def pending(self) -> bool:
        """Whether some of what was pushed is still held back, inside an unfinished character."""
        ...

    def push(self, token_id: int) -> str:
        """The text that became certain with this id; often empty inside a multi-byte character."""
        ...

    def finish(self) -> str:
        """The text still held back. An unfinished character at the very end is dropped, not given out broken."""
        ...


class Vocabulary:
    """What decoding needs to know of a tokenizer; shared by all requests."""

    def __init__(self, tokenizer: Tokenizer, decoder: Mapping[str, Any]) -> None:
        """`decoder` is the `decoder` object of the tokenizer's file."""
        self._tokenizer = tokenizer
        added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._added = {number: str(token.content) for number, token in added.items()}
        self.byte_level = _is_byte_level(decoder)
        self._bytes: dict[int, bytes] = {}

    def decoder(self) -> Decoder:
        """A fresh decoder for one choice."""
        return ByteLevelDecoder(self) if self.byte_level else WindowDecoder(self)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for (byte-level tokenizers); the token's own text for the others."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def _compute_bytes(self, token_id: int) -> bytes:
        text: str | None = self._added.get(token_id) or self._tokenizer.id_to_token(token_id)
        if text is None:
            return b""
        if not self.byte_level:
            return self.decode([token_id], skip_special=False).encode()
        alphabet = _byte_of_character()
        if all(character in alphabet for character in text):
            return bytes(alphabet[character] for character in text)
        return text.encode()

    def decode(self, token_ids: list[int], *, skip_special: bool = True) -> str:
        """The tokenizer's own decoding of a whole sequence."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special))


class ByteLevelDecoder:
    """Exact: the text given out is the UTF-8 decoding of the tokens' bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def pending(self) -> bool:
        """See `Decoder.pending`."""
        return bool(self._utf8.getstate()[0])

    def push(self, token_id: int) -> str:
        """See `Decoder.push`. Bytes that are no UTF-8 at all become U+FFFD, as the tokenizer's decoding has it."""
        if token_id in self._vocabulary.special_ids:
            return ""
        return self._utf8.decode(self._vocabulary.token_bytes(token_id))

    def finish(self) -> str:
        """See `Decoder.finish`."""
        self._utf8.reset()
        return ""


class WindowDecoder:
    """For tokenizers whose tokens are no byte runs: gives out how a window's decoding grew with the newest ids."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        self._given = 0  # how many ids at the window's front are fully given out

    @property
    def pending(self) -> bool:
        """See `Decoder.pending`."""
        return len(self._window) > self._given

    def push(self, token_id: int) -> str:
        """See `Decoder.push`."""
        if token_id in self._vocabulary.special_ids:
            return ""
        self._window.append(token_id)
        before, after = self._texts()
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        # The ids given out last stay as context: a decoder may treat a word's first token differently.
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return after[len(before) :]

    def finish(self) -> str:
        """See `Decoder.finish`."""
        before, after = self._texts()
        self._window, self._given = [], 0
        return after[len(before) :].rstrip(REPLACEMENT)

    def _texts(self) -> tuple[str, str]:
        return self._vocabulary.decode(self._window[: self._given]), self._vocabulary.decode(self._window)


def _is_byte_level(decoder: Mapping[str, Any]) -> bool:
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + number): byte for number, byte in enumerate(others)})
    return alphabet
