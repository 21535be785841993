"""Reads a dataset file as rows of token ids, tokenised the way serving will see them.

The prompt is the rendered template up to the generation prompt; the completion is what the template puts after it,
up to and including the end-of-turn token, encoded on its own. Serving encodes the prompt the same way and continues
with sampled tokens, so a row holds exactly the ids that a conversation would.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train.packing import Row

_WORD = re.compile(r"\w+")
_log = logging.getLogger(__name__)


class BadDataset(ValueError):
    """The dataset file cannot be trained on; the message says which line and why."""


@dataclass(frozen=True)
class Rows:
    """Rows in file order, each with its variants (the row itself first), and how many were left out as too long."""

    rows: tuple[tuple[Row, ...], ...]
    too_long: int


@dataclass(frozen=True)
class Variation:
    """How rows vary: each showing but the first, of `showings` in all, leaves out `word_dropout` of the question."""

    word_dropout: float = 0.0
    showings: int = 1
    seed: int = 0


def read_rows(dataset: Path, tokenizer: Any, max_tokens: int, variation: Variation = Variation()) -> Rows:
    """Tokenises every line of `dataset`; drops rows of more than `max_tokens` tokens and warns how many.

    Raises `BadDataset` when a line is not a row, or when no row is left.
    """
    rows: list[tuple[Row, ...]] = []
    too_long = 0
    chance = random.Random(variation.seed)
    for number, messages, completion in _lines(dataset):
        row = tokenise(tokenizer, messages, completion)
        if not row.targets:
            raise BadDataset(f"{dataset.name}, line {number}: the completion is empty")
        if len(row.token_ids) > max_tokens:
            too_long += 1
            continue
        variants = [row]
        for _ in range(1, variation.showings if variation.word_dropout else 1):
            fewer = leave_out_words(messages, completion, variation.word_dropout, chance)
            variants.append(tokenise(tokenizer, fewer, completion))
        rows.append(tuple(variants))
    if too_long:
        _log.warning("%d of %d rows are longer than %d tokens: left out", too_long, too_long + len(rows), max_tokens)
    if not rows:
        raise BadDataset(f"{dataset} has no row to train on ({too_long} were too long): collect more corrections")
    return Rows(tuple(rows), too_long)


def leave_out_words(
    messages: list[dict[str, Any]], completion: dict[str, Any], share: float, chance: random.Random
) -> list[dict[str, Any]]:
    """The messages with each word of the last one left out with probability `share`.

    Words that the completion repeats stay: they are what it is about. So what is learnt hangs on the subject more
    than on the wording, and questions nobody asked before find it too.
    """
    text = messages[-1].get("content")
    if not isinstance(text, str):
        return messages
    subject = set(_WORD.findall(str(completion["content"]).lower()))
    words = [
        word
        for word in text.split(" ")
        if subject.intersection(_WORD.findall(word.lower())) or chance.random() >= share
    ]
    return [*messages[:-1], {**messages[-1], "content": " ".join(words) or text}]


def tokenise(tokenizer: Any, messages: list[dict[str, Any]], completion: dict[str, Any]) -> Row:
    """The row of a prompt and its completion, which ends with the end-of-turn token."""
    prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    whole = str(tokenizer.apply_chat_template([*messages, completion], tokenize=False))
    # A template may render the last turn unlike a turn in progress; then the words themselves are what is sampled.
    tail = whole[len(prompt) :] if whole.startswith(prompt) else str(completion["content"]) + tokenizer.eos_token
    completion_ids = list(tokenizer.encode(tail, add_special_tokens=False))
    if tokenizer.eos_token_id in completion_ids:
        completion_ids = completion_ids[: completion_ids.index(tokenizer.eos_token_id) + 1]
    prompt_ids = list(tokenizer.encode(prompt, add_special_tokens=False))
    return Row(np.array([*prompt_ids, *completion_ids], dtype=np.int64), len(prompt_ids))


def _lines(dataset: Path) -> Iterator[tuple[int, list[dict[str, Any]], dict[str, Any]]]:
    with dataset.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                messages, completion = row["messages"], row["completion"]
                valid = isinstance(messages, list) and messages and isinstance(completion["content"], str)
            except (ValueError, KeyError, TypeError) as error:
                raise BadDataset(f"{dataset.name}, line {number} is not a dataset row: {error!r}") from error
            if not valid:
                raise BadDataset(f"{dataset.name}, line {number}: 'messages' must be a list with a message in it")
            yield number, messages, completion
