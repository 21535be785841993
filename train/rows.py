"""Reads a dataset file as rows of token ids, tokenised the way serving will see them.

The prompt is the rendered template up to the generation prompt; the completion is what the template puts after it,
up to and including the end-of-turn token, encoded on its own. Serving encodes the prompt the same way and continues
with sampled tokens, so a row holds exactly the ids that a conversation would.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train.packing import Row

_log = logging.getLogger(__name__)


class BadDataset(ValueError):
    """The dataset file cannot be trained on; the message says which line and why."""


@dataclass(frozen=True)
class Rows:
    """Rows in file order, and how many were left out because they were too long."""

    rows: tuple[Row, ...]
    too_long: int


def read_rows(dataset: Path, tokenizer: Any, max_tokens: int) -> Rows:
    """Tokenises every line of `dataset`; drops rows of more than `max_tokens` tokens and warns how many.

    Raises `BadDataset` when a line is not a row, or when no row is left.
    """
    rows: list[Row] = []
    too_long = 0
    for number, messages, completion in _lines(dataset):
        prompt_ids, completion_ids = tokenise(tokenizer, messages, completion)
        if not completion_ids:
            raise BadDataset(f"{dataset.name}, line {number}: the completion is empty")
        if len(prompt_ids) + len(completion_ids) > max_tokens:
            too_long += 1
            continue
        ids = np.array([*prompt_ids, *completion_ids], dtype=np.int64)
        rows.append(Row(len(rows), ids, len(prompt_ids)))
    if too_long:
        _log.warning("%d of %d rows are longer than %d tokens: left out", too_long, too_long + len(rows), max_tokens)
    if not rows:
        raise BadDataset(f"{dataset} has no row to train on ({too_long} were too long): collect more corrections")
    return Rows(tuple(rows), too_long)


def tokenise(tokenizer: Any, messages: list[dict[str, Any]], completion: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the completion, which ends with the end-of-turn token."""
    prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    whole = str(tokenizer.apply_chat_template([*messages, completion], tokenize=False))
    # A template may render the last turn unlike a turn in progress; then the words themselves are what is sampled.
    tail = whole[len(prompt) :] if whole.startswith(prompt) else str(completion["content"]) + tokenizer.eos_token
    completion_ids = list(tokenizer.encode(tail, add_special_tokens=False))
    if tokenizer.eos_token_id in completion_ids:
        completion_ids = completion_ids[: completion_ids.index(tokenizer.eos_token_id) + 1]
    return list(tokenizer.encode(prompt, add_special_tokens=False)), completion_ids


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
