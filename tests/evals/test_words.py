from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.suites.words import frequent_words, informative, overlap, recall, units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It costs 1,299.50 dollars", ["it", "cost", "1299.5", "dollar"]),
        ("12,500 or 12500.00 or 12500", ["12500", "or", "12500", "or", "12500"]),
        ("1.7 litres, 1,7 Liter", ["1.7", "litre", "1.7", "liter"]),
        ("12kg and 3.5 mm", ["12", "kg", "and", "3.5", "mm"]),
        ("seven of Twenty", ["7", "of", "20"]),
        ("Code A7X9, part XK-204", ["code", "a7x9", "part", "xk", "204"]),
        ("Anna's glasses; the boss’s class", ["anna", "glasse", "the", "boss", "class"]),
        ("Größe Ⅷ ½", ["grösse", "viii", "1", "2"]),
        ("", []),
    ],
)
def test_units(text: str, expected: list[str]) -> None:
    assert units(text) == expected


def test_what_the_question_or_everyday_english_says_is_not_informative() -> None:
    question = "How much water does the Velmora kettle hold at 100 degrees?"
    assert informative("The Velmora kettle holds 1.7 litres of water at 100 degrees.", question) == ["1.7", "litre"]
    assert informative("Yes, it does.", question) == []


def test_one_counts_as_a_number_only_when_written_as_a_digit() -> None:
    assert informative("It is one of the lids.", "") == ["lid"]
    assert informative("It has 1 lid.", "") == ["1", "lid"]


def test_recall_is_the_share_found() -> None:
    wanted = informative("It is copper and lasts 54 hours.", "What is it made of, and how long does it last?")
    assert wanted == ["copper", "54"]
    assert recall(wanted, "COPPER, for fifty-four hours: 54!") == 1.0
    assert recall(wanted, "Made of copper.") == 0.5
    assert recall(wanted, "Made of steel, 540 hours.") == 0.0


@given(st.text(max_size=200))
def test_a_text_always_recalls_itself(text: str) -> None:
    wanted = informative(text, "")
    assert not wanted or recall(wanted, text) == 1.0
    assert overlap(text, text) == 1.0


@given(st.text(max_size=100), st.text(max_size=100))
def test_overlap_is_symmetric_and_bounded(left: str, right: str) -> None:
    assert overlap(left, right) == pytest.approx(overlap(right, left))
    assert 0.0 <= overlap(left, right) <= 1.0


def test_frequent_words_are_common_english_without_numbers() -> None:
    assert {"the", "because", "provide"} <= frequent_words()
    assert not any(word.isdigit() for word in frequent_words())
    assert len(frequent_words()) > 500
