from __future__ import annotations

from typing import Any

import pytest

from evals.suites.checks import CHECKS, run_checks


@pytest.mark.parametrize(
    ("check", "argument", "answer", "grade"),
    [
        ("words_exactly", 1, "Paris.", 1.0),
        ("words_exactly", 2, "It is Paris", 0.5),
        ("words_exactly", 1, "It is surely Paris", 0.0),
        ("words_at_most", 3, "Hi", 1.0),
        ("words_at_most", 4, "one two three four five", 0.75),
        ("list_of", 3, "- a\n- b\n- c", 1.0),
        ("list_of", 3, "Here:\n1. a\n2) b", pytest.approx(2 / 3)),
        ("list_of", 3, "a\nb\nc", 0.5),
        ("comma_list_of", 3, "a, b, c", 1.0),
        ("comma_list_of", 3, "a, b, c\nd", 0.5),
        ("sentences", 1, "The sun is 4.6 billion years old.", 1.0),
        ("sentences", 2, "It snows! Is it cold?", 1.0),
        ("ends_with", "peace", "We want Peace.", 1.0),
        ("ends_with", "peace", "Peace is good", 0.5),
        ("starts_with", "yes", "Yes, it is", 1.0),
        ("starts_with", "yes", "No", 0.0),
        ("contains", ["cat", "dog"], "A Cat", 0.5),
        ("excludes", ["?", "!"], "Really?", 0.5),
        ("upper_case", True, "HELLO 5", 1.0),
        ("upper_case", True, "Hello", 0.2),
        ("lower_case", True, "france", 1.0),
        ("lower_case", True, "123", 0.0),
        ("one_of", ["yes", "no"], "No.", 1.0),
        ("one_of", ["yes", "no"], "No, it is not", 0.5),
        ("one_of", ["yes", "no"], "Nobody knows", 0.0),
        ("number_only", True, " 12. ", 1.0),
        ("number_only", True, "It has 8 legs.", 0.5),
        ("number_only", True, "2 + 3 = 5", 0.0),
    ],
)
def test_grades(check: str, argument: Any, answer: str, grade: float) -> None:
    assert run_checks({check: argument}, answer) == grade


def test_every_check_grades_anything_between_nothing_and_all() -> None:
    arguments: dict[str, Any] = {
        "ends_with": "a",
        "starts_with": "a",
        "contains": ["a"],
        "excludes": ["a"],
        "one_of": ["a"],
    }
    for name in CHECKS:
        for answer in ("", " \n", "a", "- \n", "?!", "A a, a. 7\n1. b"):
            assert 0.0 <= run_checks({name: arguments.get(name, 2)}, answer) <= 1.0


def test_an_empty_answer_is_worth_nothing() -> None:
    assert run_checks({"excludes": ["x"]}, "  \n") == 0.0


def test_several_checks_count_alike() -> None:
    assert run_checks({"words_exactly": 1, "contains": ["Paris"]}, "Rome") == 0.5
