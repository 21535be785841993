"""The session that every engine resumes: 4,000 tokens of real text, and the user's next message."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

SESSION_TOKENS = 4000
TEXTS = Path(__file__).resolve().parents[2] / "evals" / "suites" / "data" / "texts.jsonl"
NEXT_TURN = "<|im_end|>\n<|im_start|>user\nWhat was said first?<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Session:
    """Token ids: what was said, and what is said next."""

    history: tuple[int, ...]
    turn: tuple[int, ...]


def load_session(model: Path, tokens: int = SESSION_TOKENS) -> Session:
    """The session in the token ids of the model in the folder `model`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    history: list[int] = []
    rows = [json.loads(line)["text"] for line in TEXTS.read_text().splitlines()]
    while len(history) < tokens:
        for text in rows:
            history += tokenizer.encode(f"{text}\n\n", add_special_tokens=False).ids
    return Session(tuple(history[:tokens]), tuple(tokenizer.encode(NEXT_TURN, add_special_tokens=False).ids))


def benchmark_model() -> Path:
    """Folder of the bundled model: `KVLOOP_TEST_MODEL`, or converted once and kept in the user's cache."""
    from serve.pull import DEFAULT_MODEL, pull

    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kvloop" / "models"
    return pull(os.environ.get("KVLOOP_TEST_MODEL", DEFAULT_MODEL), cache)
