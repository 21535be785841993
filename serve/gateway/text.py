"""Words to token ids and back, for one model folder. Only new text is ever encoded; history is kept as ids."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from blake3 import blake3
from tokenizers import Tokenizer

from serve.gateway.detokenize import Vocabulary
from serve.gateway.template import ESCAPE_OPEN, ChatTemplate, Escapes, Message, read_special_tokens, read_template


class TextCodec:
    """Tokenizer and chat template of one model. Thread-safe: nothing is changed after loading."""

    def __init__(self, folder: Path) -> None:
        """Loads `tokenizer.json`, the template and the context length; raises `ValueError` when one is missing."""
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ValueError(f"{folder} has no tokenizer.json: only fast tokenizers are supported")
        self._source = file.read_text()
        self._tokenizer = Tokenizer.from_str(self._source)
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        self._special = {str(token.content): number for number, token in added.items() if token.special}
        self._escapes = Escapes(self._special)
        self._special_pattern = re.compile(
            "|".join(re.escape(text) for text in sorted(self._special, key=len, reverse=True)) or "(?!)"
        )
        self.template = ChatTemplate(read_template(folder), read_special_tokens(folder), self._escapes)
        self.vocabulary = Vocabulary(self._tokenizer, json.loads(self._source).get("decoder") or {})
        self.context_length = _context_length(folder)
        self.digest = blake3(self._source.encode() + b"\0" + self.template.source.encode()).hexdigest()

    def encode(self, rendered: str) -> list[int]:
        """Token ids of rendered text (escapes in contents, see `template`); the template's special strings become
        their tokens, a person's never do."""
        if ESCAPE_OPEN not in rendered:
            return _ids(self._tokenizer, rendered)
        token_ids: list[int] = []
        position = 0
        for found in self._special_pattern.finditer(rendered):
            token_ids += self.encode_plain(self._escapes.unescape(rendered[position : found.start()]))
            token_ids.append(self._special[found.group()])
            position = found.end()
        return token_ids + self.encode_plain(self._escapes.unescape(rendered[position:]))

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of text in which nothing is special."""
        if not text:
            return []
        token_ids = _ids(self._plain, text)
        if not self.vocabulary.special_ids.isdisjoint(token_ids):
            raise ValueError("this tokenizer turns ordinary text into control tokens; the text is refused")
        return token_ids

    @cached_property
    def _plain(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self._source)
        tokenizer.encode_special_tokens = True
        return tokenizer

    def first_turn(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation that starts here, up to the point where the assistant speaks."""
        return self.encode(self.template.render(messages, add_generation_prompt=True))

    def next_turn(self, history: Sequence[Message], new: Sequence[Message], last_id: int) -> list[int]:
        """Ids to append to a stored conversation so that the assistant can speak again.

        `history` ends with the assistant's stored reply, whose ids end with `last_id`. The reply is rendered as a
        marker, and only what follows the marker is encoded; an end-of-turn token the reply already ends with is not
        repeated. Raises `ValueError` when the template does not show the reply exactly once.
        """
        # Letters and digits only, so that no template that trims or splits contents can change it; random, so that
        # nobody can type it.
        marker = f"previousReply{secrets.token_hex(16)}"
        marked = [*history[:-1], {**history[-1], "content": marker}, *new]
        rendered = self.template.render(marked, add_generation_prompt=True)
        position = rendered.rfind(marker)
        if position < 0:
            raise ValueError("the model's chat template does not show earlier replies, so a session cannot go on")
        delta = rendered[position + len(marker) :]
        leading = delta[: self.leading_special(delta)]
        if leading and self._special[leading] == last_id:
            delta = delta[len(leading) :]
        return self.encode(delta)

    def escape(self, text: str) -> str:
        """What a person wrote, as `encode` expects it within rendered text."""
        return self._escapes.escape(text)

    def leading_special(self, rendered: str) -> int:
        """Length of the special string that rendered text begins with; 0 when it begins with another."""
        leading = self._special_pattern.match(rendered)
        return 0 if leading is None else leading.end()

    def history_digest(self, messages: Sequence[Message], user: str = "", memory_ids: Sequence[str] = ()) -> bytes:
        """32 bytes that name a conversation ending with a reply, by its rendered bytes.

        The tokenizer, the template, the `user` a client named and the memories are part of it: ids are only found
        again by the same kind of client, under the same tokenizer, with the same memories.
        """
        rendered = self.template.render(messages, add_generation_prompt=False)
        parts: list[Any] = [self.digest, user, rendered]
        if memory_ids:
            parts.append(list(memory_ids))
        return blake3(json.dumps(parts).encode()).digest()


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    # A batch, because `encode` keeps the interpreter's lock: megabytes of text would stop every other request.
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _context_length(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    length = config.get("max_position_embeddings")
    if not isinstance(length, int):
        raise ValueError(f"{folder}/config.json names no max_position_embeddings")
    return length
