"""How memories stand at the beginning of a prompt: before everything that is said, each as a system message.

Invariants: the ids of memories depend on nothing but their texts and order, so every session that attaches the same
memories begins with the same ids; they are encoded apart from what follows, so no tokenizer merges across the border.
A template that shows only one system message gets the memories at the beginning of that, and one that knows no system
message at the beginning of the first message.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from serve.gateway.template import TemplateError
from serve.gateway.text import TextCodec

Json = dict[str, Any]
Shape = Callable[[Sequence[str], Sequence[Json]], list[Json]]

_BREAK = "\n\n"


class MemoryTemplate:
    """Renders memories for one model. Thread-safe."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def prefix_ids(self, texts: Sequence[str]) -> list[int]:
        """Ids of the beginning that these memories make. Raises `ValueError` when the template cannot show them."""
        token_ids: list[int] = []
        opening, *after = self._parts(len(texts), [{"role": "user", "content": "?"}])
        for text, rest in zip(texts, after, strict=True):
            closing = self._closing(rest)
            token_ids += self._codec.encode(opening + self._codec.escape(text.strip()) + rest[:closing])
            opening = rest[closing:]
        return token_ids

    def first_turn(self, count: int, messages: Sequence[Json]) -> list[int]:
        """Ids that follow those of `count` memories in a conversation that starts with these messages."""
        if not count:
            return self._codec.first_turn(messages)
        rest = self._parts(count, messages)[-1]
        return self._codec.encode(rest[self._closing(rest) :])

    def _closing(self, rest: str) -> int:
        # Where memories share a message with other text, what ends that message is not theirs.
        return self._codec.leading_special(rest) if self._shape is _separate else 0

    def _parts(self, count: int, messages: Sequence[Json]) -> list[str]:
        """The rendered conversation, cut where the memories' texts belong: `count + 1` pieces."""
        markers = [_marker() for _ in range(count)]
        rendered = self._codec.template.render(self._shape(markers, messages), add_generation_prompt=True)
        parts = []
        for marker in markers:
            before, found, rendered = rendered.partition(marker)
            if not found or marker in rendered:
                raise ValueError("the model's chat template does not show memories as they are")
            parts.append(before)
        return [*parts, rendered]

    @cached_property
    def _shape(self) -> Shape:
        said = [{"role": "system", "content": _marker()}, {"role": "user", "content": _marker()}]
        for shape, messages in ((_separate, said), (_merged, said), (_in_first, said[1:])):
            markers = [_marker(), _marker()]
            try:
                rendered = self._codec.template.render(shape(markers, messages), add_generation_prompt=True)
            except TemplateError:
                continue
            places = [rendered.find(text) for text in (*markers, *(message["content"] for message in messages))]
            if -1 not in places and places == sorted(places):
                return shape
        raise ValueError("the model's chat template shows no memories")


def _separate(texts: Sequence[str], messages: Sequence[Json]) -> list[Json]:
    return [*({"role": "system", "content": text} for text in texts), *messages]


def _merged(texts: Sequence[str], messages: Sequence[Json]) -> list[Json]:
    own = [messages[0]["content"]] if messages and messages[0]["role"] in ("system", "developer") else []
    return [{"role": "system", "content": _BREAK.join([*texts, *own])}, *messages[len(own) :]]


def _in_first(texts: Sequence[str], messages: Sequence[Json]) -> list[Json]:
    first = messages[0]
    return [{**first, "content": _BREAK.join([*texts, first["content"]])}, *messages[1:]]


def _marker() -> str:
    # Letters and digits only, so that no template changes it; random, so that nobody can type it.
    return f"memory{secrets.token_hex(16)}"
