"""Checks of an answer's form. Each takes the answer and its argument and gives a grade in [0, 1]."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[str, Any], float]

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+\S", re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?]+(?=\s|$)")


def run_checks(checks: Mapping[str, Any], answer: str) -> float:
    """The mean grade of all `checks` (name to argument); an empty answer is worth nothing. KeyError: unknown check."""
    if not answer.strip():
        return 0.0
    return sum(CHECKS[name](answer, argument) for name, argument in checks.items()) / len(checks)


def words_exactly(answer: str, count: int) -> float:
    """Full marks for `count` words, falling off with the miss relative to `count`."""
    return _near(len(_WORD.findall(answer)), count)


def words_at_most(answer: str, count: int) -> float:
    """Full marks up to `count` words, falling off above."""
    found = len(_WORD.findall(answer))
    return 1.0 if found <= count else _near(found, count)


def list_of(answer: str, count: int) -> float:
    """A bulleted or numbered list of `count` items; separate lines count half when no line is marked."""
    marked = len(_BULLET.findall(answer))
    if marked:
        return _near(marked, count)
    return 0.5 * _near(len([line for line in answer.splitlines() if line.strip()]), count)


def comma_list_of(answer: str, count: int) -> float:
    """One line of `count` parts, separated by commas."""
    lines = [line for line in answer.strip().splitlines() if line.strip()]
    parts = [part for part in lines[0].split(",") if part.strip()]
    return _near(len(parts), count) * (1.0 if len(lines) == 1 else 0.5)


def sentences(answer: str, count: int) -> float:
    """`count` sentences, by their end marks."""
    return _near(len(_SENTENCE_END.findall(answer)), count)


def ends_with(answer: str, word: str) -> float:
    """The last word is `word`, whatever the case; half marks when the answer holds it elsewhere."""
    found = [each.casefold() for each in _WORD.findall(answer)]
    return _placed(found, -1, word)


def starts_with(answer: str, word: str) -> float:
    """The first word is `word`, whatever the case; half marks when the answer holds it elsewhere."""
    found = [each.casefold() for each in _WORD.findall(answer)]
    return _placed(found, 0, word)


def contains(answer: str, wanted: list[str]) -> float:
    """The share of `wanted` texts that occur in the answer, whatever the case."""
    return sum(text.casefold() in answer.casefold() for text in wanted) / len(wanted)


def excludes(answer: str, unwanted: list[str]) -> float:
    """The share of `unwanted` texts that do not occur in the answer, whatever the case."""
    return sum(text.casefold() not in answer.casefold() for text in unwanted) / len(unwanted)


def upper_case(answer: str, _: bool) -> float:
    """The share of letters in upper case."""
    letters = [character for character in answer if character.isalpha()]
    return sum(letter.isupper() for letter in letters) / len(letters) if letters else 0.0


def lower_case(answer: str, _: bool) -> float:
    """The share of letters in lower case."""
    letters = [character for character in answer if character.isalpha()]
    return sum(letter.islower() for letter in letters) / len(letters) if letters else 0.0


def one_of(answer: str, choices: list[str]) -> float:
    """Nothing but one of `choices`, whatever the case; half marks when it starts with one."""
    found = " ".join(each.casefold() for each in _WORD.findall(answer))
    wanted = [choice.casefold() for choice in choices]
    if found in wanted:
        return 1.0
    return 0.5 if any(found.startswith(f"{choice} ") for choice in wanted) else 0.0


def number_only(answer: str, _: bool) -> float:
    """One number and nothing else; half marks when there is exactly one number among words."""
    if re.fullmatch(r"\s*[-+]?\d+(?:[.,]\d+)*\s*\.?\s*", answer):
        return 1.0
    return 0.5 if len(re.findall(r"\d+(?:[.,]\d+)*", answer)) == 1 else 0.0


def _placed(words: list[str], position: int, word: str) -> float:
    if not words:
        return 0.0
    if words[position] == word.casefold():
        return 1.0
    return 0.5 if word.casefold() in words else 0.0


def _near(found: int, wanted: int) -> float:
    return max(0.0, 1.0 - abs(found - wanted) / wanted)


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        words_exactly, words_at_most, list_of, comma_list_of, sentences, ends_with, starts_with, contains, excludes,
        upper_case, lower_case, one_of, number_only,
    )
}  # fmt: skip
