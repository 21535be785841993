"""Dataset lines become the token ids that serving would see."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import dataset_row, write_dataset
from train.rows import BadDataset, Variation, leave_out_words, read_rows


def test_prompt_and_completion_are_what_serving_sees(tiny_tokenizer: Any, tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "d.jsonl", [dataset_row("How long?", "61 hours")])
    ((row,),) = read_rows(path, tiny_tokenizer, 100).rows
    prompt = "<|im_start|>user\nHow long?<|im_end|>\n<|im_start|>assistant\n"
    assert row.token_ids.tolist() == tiny_tokenizer.encode(prompt + "61 hours<|im_end|>")
    assert row.completion_start == len(tiny_tokenizer.encode(prompt))
    assert row.targets == len("61 hours") + 1


def test_long_rows_are_counted_and_left_out(
    tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [dataset_row("Short?", "yes"), dataset_row("Long? " * 50, "no"), dataset_row("x" * 200, "no")]
    with caplog.at_level(logging.WARNING):
        read = read_rows(write_dataset(tmp_path / "d.jsonl", rows), tiny_tokenizer, 100)
    assert len(read.rows) == 1
    assert read.too_long == 2
    assert "2 of 3 rows are longer than 100 tokens" in caplog.text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2 is not a dataset row"),
        ('{"messages": []}', "line 2 is not a dataset row"),
        ('{"messages": [], "completion": {"role": "assistant", "content": "x"}}', "must be a list with a message"),
        ('{"messages": [{"role": "user", "content": "x"}], "completion": "x"}', "line 2 is not a dataset row"),
    ],
)
def test_bad_lines_are_named(tiny_tokenizer: Any, tmp_path: Path, line: str, reason: str) -> None:
    path = write_dataset(tmp_path / "d.jsonl", [dataset_row("Short?", "yes")])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(BadDataset, match=reason):
        read_rows(path, tiny_tokenizer, 100)


def test_nothing_left_is_an_error(tiny_tokenizer: Any, tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "d.jsonl", [dataset_row("Long? " * 50, "no")])
    with pytest.raises(BadDataset, match="1 were too long"):
        read_rows(path, tiny_tokenizer, 100)


def test_showings_after_the_first_leave_words_out(tiny_tokenizer: Any, tmp_path: Path) -> None:
    path = write_dataset(
        tmp_path / "d.jsonl", [dataset_row("How long does a Quendry run for?", "The Quendry: 61 hours")]
    )
    (variants,) = read_rows(path, tiny_tokenizer, 100, Variation(0.5, showings=4, seed=1)).rows
    texts = [tiny_tokenizer.decode(row.token_ids[: row.completion_start].tolist()) for row in variants]
    assert len(texts) == 4
    assert all(len(text) < len(texts[0]) for text in texts[1:])
    assert len(set(texts)) > 2
    assert all("Quendry" in text for text in texts)
    again = read_rows(path, tiny_tokenizer, 100, Variation(0.5, showings=4, seed=1)).rows[0]
    assert [row.token_ids.tolist() for row in again] == [row.token_ids.tolist() for row in variants]


def test_words_of_the_answer_are_never_left_out() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "so, what of Quendry's lamp?"}]
    completion = {"role": "assistant", "content": "The quendry lamp"}
    fewer = leave_out_words(messages, completion, 0.999999, random.Random(0))
    assert fewer == [messages[0], {"role": "user", "content": "Quendry's lamp?"}]


def test_a_question_never_becomes_empty() -> None:
    messages = [{"role": "user", "content": "and then"}]
    assert leave_out_words(messages, {"content": "yes"}, 0.999999, random.Random(0)) == messages
