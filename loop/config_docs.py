"""Writes docs/configuration.md from the settings' own docstrings, so that the page cannot disagree with the code."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from loop.config import COPIED_SECTIONS, Config, section_of

HEADER = """# Configuration

<!-- Written by `kvloop config --docs`; a test compares the two. Edit the docstrings, not this page. -->

Every setting has one default, in the layer that uses it. Values are looked up in this order, the first wins:

1. the command line: `kvloop --set worker.threads=2 up`
2. the environment: `KVLOOP_WORKER__THREADS=2`
3. `kvloop.toml` in the home folder:

   ```toml
   model = "smollm2-135m-instruct"

   [worker]
   threads = 2
   ```

An unknown key, wherever it stands, is an error that names the nearest known one. `kvloop config` prints what is in
force. The home folder is `./.kvloop`, or `KVLOOP_HOME`, or `kvloop --home`.
"""


def markdown() -> str:
    """The whole page."""
    return "\n".join([HEADER, *_sections("", Config)])


def _sections(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    title = f"`[{prefix.removesuffix('.')}]`" if prefix else "Top level"
    introduction = inspect.cleandoc(model.__doc__ or "") if prefix else ""
    yield _table(title, prefix, model, introduction)
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is not None and prefix + name not in COPIED_SECTIONS:
            yield from _sections(f"{prefix}{name}.", section)


def _table(title: str, prefix: str, model: type[BaseModel], introduction: str) -> str:
    lines = [f"## {title}", ""]
    if introduction:
        lines += [introduction, ""]
    lines += ["| setting | default | meaning |", "|---|---|---|"]
    lines += [f"| `{prefix}{name}` | {default} | {meaning} |" for name, default, meaning in _rows(model)]
    return "\n".join(lines) + "\n"


def _rows(model: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        if section_of(field) is None:
            yield name, _default(field), " ".join((field.description or "").split()).replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "set by kvloop"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, Path):
        value = str(value)
    return f"`{json.dumps(value, default=str)}`"
