"""What counts as personal data, and as nearly the same text."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.scrub import scrub, scrub_text
from train.similar import SimilarTexts


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("write to first.last+tag@mail.example.co.uk.", "email"),
        ("call +1 (415) 555-2671 now", "phone"),
        ("call +491712345678", "phone"),
        ("call 415-555-2671", "phone"),
        ("call (415) 555-2671", "phone"),
        ("ruf 0171 2345678 an", "phone"),
        ("ruf 030 / 1234 5678 an", "phone"),
        ("pay with 4111111111111111", "card"),
        ("pay with 5500-0000-0000-0004, please", "card"),
    ],
)
def test_personal_data_is_replaced(text: str, kind: str) -> None:
    counts: Counter[str] = Counter()
    cleaned = scrub_text(text, counts)
    assert counts == {kind: 1}
    assert f"[{kind}]" in cleaned
    assert not any(character.isdigit() or character == "@" for character in cleaned)


@pytest.mark.parametrize(
    "text",
    [
        "It boils in 47 seconds.",
        "It weighs 1,250.75 grams and costs 1 299 euros.",
        "100 000 000 km, 3.14159265358979",
        "Order 2024-01-15, part 4711-0815",
        "Serial 4111111111111112",
        "0000000000000000",
        "10:30 to 11:45, 12/24/2025",
        "a @ b, 5 @ 6",
    ],
)
def test_numbers_that_products_are_about_stay(text: str) -> None:
    counts: Counter[str] = Counter()
    assert scrub_text(text, counts) == text
    assert not counts


@given(st.text())
def test_scrubbing_twice_changes_nothing_more(text: str) -> None:
    once = scrub_text(text, Counter())
    assert scrub_text(once, Counter()) == once


def test_every_text_of_a_message_is_scrubbed_but_ids_stay() -> None:
    call = {"id": "a@b.example", "type": "function", "function": {"arguments": '{"to": "a@b.example"}'}}
    message = {"role": "assistant", "content": ["x@y.example"], "tool_calls": [call], "count": 3}
    counts: Counter[str] = Counter()
    cleaned = scrub(message, counts)
    assert cleaned["tool_calls"][0] == call | {"function": {"arguments": '{"to": "[email]"}'}}
    assert (cleaned["content"], cleaned["count"], counts["email"]) == (["[email]"], 3, 2)


def test_similarity_is_that_of_runs_of_three_words() -> None:
    texts = SimilarTexts(["one two three four five", "completely different words"])
    assert texts.nearest("One, two: three four FIVE!") == 1.0
    assert texts.nearest("one two three four six") == pytest.approx(2 / 4)
    assert texts.nearest("nothing in common here") == 0.0
    assert texts.nearest("") == 0.0
    assert SimilarTexts([]).nearest("one two three") == 0.0
