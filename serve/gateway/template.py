"""Chat templates, rendered as transformers does it, in a sandbox: a template is data that came with a model.

What a person wrote never becomes a control token. Before rendering, every special-token string inside a message's
content is replaced by an escape (`U+FDD0 index U+FDD1`; both are Unicode noncharacters and are escaped themselves, so
the replacement is reversible and two different conversations never render to the same bytes). `TextCodec.encode`
turns escapes back into ordinary text. Special tokens in a rendered conversation come from the template alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

ESCAPE_OPEN = "\ufdd0"
ESCAPE_CLOSE = "\ufdd1"

Message = Mapping[str, Any]


class TemplateError(ValueError):
    """The template refused a conversation, for example because roles do not alternate."""


class Escapes:
    """Reversible replacement of special-token strings in text that people wrote."""

    def __init__(self, special_strings: Iterable[str]) -> None:
        longest_first = sorted(set(special_strings), key=lambda text: (-len(text), text))
        self._table = [*longest_first, ESCAPE_OPEN, ESCAPE_CLOSE]
        self._index = {text: number for number, text in enumerate(self._table)}
        self._find = re.compile("|".join(re.escape(text) for text in self._table))
        self._escaped = re.compile(f"{ESCAPE_OPEN}([0-9]+){ESCAPE_CLOSE}")

    def escape(self, text: str) -> str:
        """`text` with each special string replaced by its escape."""
        return self._find.sub(lambda found: f"{ESCAPE_OPEN}{self._index[found.group()]}{ESCAPE_CLOSE}", text)

    def unescape(self, text: str) -> str:
        """The inverse of `escape`."""
        return self._escaped.sub(lambda found: self._table[int(found.group(1))], text)


class ChatTemplate:
    """One model's chat template. `render` gives escaped text; safe to use from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], escapes: Escapes) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._escapes = escapes
        self._template = _environment().from_string(source)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as the model reads it, with escapes in place of special strings in contents.

        `messages` need `role` and `content`; role "developer" is given to the template as "system".
        Raises `TemplateError` with the template's own words when it refuses the conversation.
        """
        visible = [
            {"role": _role(message), "content": self._escapes.escape(message["content"])} for message in messages
        ]
        try:
            return self._template.render(
                messages=visible, tools=None, documents=None, add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )  # fmt: skip
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template refused this conversation: {error.message}") from error


def _role(message: Message) -> str:
    role = str(message["role"])
    return "system" if role == "developer" else role


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def read_template(folder: Path) -> str:
    """The folder's chat template: `chat_template.jinja`, else the field of `tokenizer_config.json`.

    Raises `ValueError` when the model has none: a base model that was never taught to chat.
    """
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    config = _tokenizer_config(folder)
    given = config.get("chat_template")
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        named = {entry["name"]: entry["template"] for entry in given}
        if "default" in named:
            return str(named["default"])
    raise ValueError(f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)")


def read_special_tokens(folder: Path) -> dict[str, str]:
    """The named special tokens (`bos_token`, `eos_token`, ...) a template may refer to."""
    return {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in _tokenizer_config(folder).items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    loaded = json.loads(file.read_text()) if file.exists() else {}
    return loaded if isinstance(loaded, dict) else {}
