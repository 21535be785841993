"""Takes obvious personal data out of text before anything is trained on it.

Obvious means: e-mail addresses, payment card numbers (with a right check digit) and phone numbers in the usual ways
of writing. Names and addresses are not found. Short numbers and measures stay: they are what products are about.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

_EMAIL = re.compile(r"[\w.+%-]+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}")
_CARD = re.compile(r"(?<![\w.])\d(?:[ -]?\d){12,18}(?!\w)")
_PHONES = (
    re.compile(r"(?<![\w+])\+\d{1,3}(?:[ ./-]?\(?\d{1,5}\)?){2,6}(?!\w)"),
    re.compile(r"(?<![\w.])(?:1[ .-])?(?:\(\d{3}\) ?|\d{3}[.-])\d{3}[ .-]\d{4}(?!\w)"),
    re.compile(r"(?<![\w.])\(?0\d{2,4}\)?(?: ?[/-] ?| )\d{2,4}(?:[ -]?\d{2,4}){1,3}(?!\w)"),
)
_LEAST_PHONE_DIGITS, _MOST_PHONE_DIGITS = 8, 15
_NOT_WORDS = frozenset({"role", "type", "id", "tool_call_id"})


def scrub_text(text: str, counts: Counter[str]) -> str:
    """The text with placeholders for personal data; `counts` gets one more for each, by kind."""

    def found(kind: str, replaced: re.Match[str]) -> str:
        counts[kind] += 1
        return f"[{kind}]"

    def card(match: re.Match[str]) -> str:
        return found("card", match) if _is_card(match.group()) else match.group()

    def phone(match: re.Match[str]) -> str:
        digits = sum(character.isdigit() for character in match.group())
        return found("phone", match) if _LEAST_PHONE_DIGITS <= digits <= _MOST_PHONE_DIGITS else match.group()

    text = _EMAIL.sub(lambda match: found("email", match), text)
    text = _CARD.sub(card, text)
    for pattern in _PHONES:
        text = pattern.sub(phone, text)
    return text


def scrub(value: Any, counts: Counter[str]) -> Any:
    """A copy of a JSON value, every text in it scrubbed, but for roles, types and ids."""
    if isinstance(value, str):
        return scrub_text(value, counts)
    if isinstance(value, list | tuple):
        return [scrub(item, counts) for item in value]
    if isinstance(value, dict):
        return {key: item if key in _NOT_WORDS else scrub(item, counts) for key, item in value.items()}
    return value


def _is_card(text: str) -> bool:
    """Luhn's check (ISO/IEC 7812-1)."""
    digits = [int(character) for character in reversed(text) if character.isdigit()]
    doubled = [digit * 2 - 9 if digit > 4 else digit * 2 for digit in digits[1::2]]
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0 and len(set(digits)) > 1
