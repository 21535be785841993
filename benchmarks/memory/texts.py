"""Real text of several kinds, cut into windows: what is measured on, none of which the product calibrates with.

Code and docstrings are the running Python's, licences those of the installed packages, documents and questions this
repository's. So the text is there on every machine, and differs between machines only where Python and packages do.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("statistics", "argparse", "tarfile", "logging", "difflib", "ast", "zipfile", "pickle", "typing", "inspect")
DOCUMENTED = ("decimal", "datetime", "itertools", "random", "re", "socket", "subprocess", "threading", "unittest.mock")
DOCUMENTS = ("docs/api.md", "docs/configuration.md", "docs/memory-and-promotion.md", "README.md")
LICENCES = 40

Encode = Callable[[str], Sequence[int]]


def kinds() -> dict[str, str]:
    """All text there is, by kind."""
    return {"prose": _prose(), "dialogue": _dialogue(), "code": _code(), "documents": _documents(), "legal": _legal()}


def windows(encode: Encode, size: int, count: int) -> list[tuple[str, list[int]]]:
    """`count` windows of `size` tokens with their kinds, taken from the kinds in turn while they last."""
    found: dict[str, list[list[int]]] = {}
    for kind, text in kinds().items():
        ids = list(encode(text))
        found[kind] = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    chosen: list[tuple[str, list[int]]] = []
    while len(chosen) < count and any(found.values()):
        for kind, waiting in found.items():
            if waiting and len(chosen) < count:
                chosen.append((kind, waiting.pop(0)))
    if len(chosen) < count:
        raise ValueError(f"there is text for {len(chosen)} windows of {size} tokens, not for {count}")
    return chosen


def _prose() -> str:
    lines = (ROOT / "evals/suites/data/texts.jsonl").read_text().splitlines()
    return "\n\n".join(json.loads(line)["text"] for line in lines)


def _dialogue() -> str:
    turns = []
    for line in (ROOT / "evals/suites/data/knowledge.jsonl").read_text().splitlines():
        entry = json.loads(line)
        choices = ", ".join(entry["choices"])
        turns.append(f"<|im_start|>user\n{entry['question']}\nChoices: {choices}<|im_end|>\n")
        turns.append(f"<|im_start|>assistant\nThe answer is {entry['choices'][entry['answer']]}.<|im_end|>\n")
    return "".join(turns)


def _code() -> str:
    return "\n\n".join(inspect.getsource(importlib.import_module(name))[:60_000] for name in CODE)


def _documents() -> str:
    documents = [(ROOT / name).read_text() for name in DOCUMENTS]
    for name in DOCUMENTED:
        module = importlib.import_module(name)
        parts = [inspect.getdoc(module) or ""]
        for label, member in sorted(vars(module).items()):
            text = inspect.getdoc(member) if callable(member) and not label.startswith("_") else None
            if text and len(text) > 200:
                parts.append(f"{name}.{label}\n{text}")
        documents.append("\n\n".join(parts))
    return "\n\n".join(documents)


def _legal() -> str:
    seen: dict[str, str] = {}
    for found in sorted(distributions(), key=lambda each: each.metadata["Name"] or ""):
        for file in found.files or ():
            if "LICENSE" in file.name.upper() and len(seen) < LICENCES:
                path = Path(str(file.locate()))
                text = path.read_text(errors="replace") if path.is_file() else ""
                seen.setdefault(text[200:500], text)
    return "\n\n".join(text for text in seen.values() if len(text) > 2000)


if __name__ == "__main__":
    sys.stdout.write("".join(f"{kind}: {len(text)} characters\n" for kind, text in kinds().items()))
