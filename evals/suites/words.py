"""Which words of an answer carry its information, and how much of it another answer holds.

Text is cut into units: numbers ("1,299.50" is 1299.5, "seven" is 7, "12kg" is 12 and kg), codes of letters and
digits ("A7X"), and words, folded to lower case without accents' variants (NFKC) and without a plural or possessive s.
A unit of a reference answer is informative unless the question already says it or it is one of some 600 frequent
English words. Numbers in the question are not informative either: repeating them proves nothing.

Limits, stated: the list of frequent words is English, so in other languages small words count too; order and negation
are not seen ("not 5 but 7" holds 5); synonyms do not count. The scores are compared between models on the same
examples, where such flaws mostly cancel.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from pathlib import Path

FREQUENT_WORDS = Path(__file__).parent / "data" / "frequent_words.txt"

_PIECES = re.compile(r"\d+(?:[.,]\d+)+|[^\W_]+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NUMBER_AND_UNIT = re.compile(r"(\d+)([^\W\d_]{1,4})")
_DIGIT_ONE = re.compile(r"(?<![\d.,])1(?!\d|[.,]\d)")
_NUMBER_WORDS = [
    *["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
    *["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"],
]
_TENS = ["thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "hundred"]
_VALUES = {word: str(value) for value, word in enumerate(_NUMBER_WORDS)}
_VALUES |= {word: str(10 * tens) for tens, word in enumerate(_TENS, start=3)}


def units(text: str) -> list[str]:
    """The units of `text`, in order, as comparable strings."""
    folded = unicodedata.normalize("NFKC", text).casefold().replace("’", "'").replace("'s", "")
    found: list[str] = []
    for piece in _PIECES.findall(folded):
        if _NUMBER.fullmatch(piece):
            found.append(_number(piece))
        elif (both := _NUMBER_AND_UNIT.fullmatch(piece)) is not None:
            found += [_number(both.group(1)), both.group(2)]
        elif len(piece) > 1:
            found.append(_VALUES.get(piece, _singular(piece)))
    return found


def informative(reference: str, question: str) -> list[str]:
    """The informative units of `reference`, each once, in order of appearance; empty when there is none."""
    known = set(units(question)) | frequent_words()
    # "one" is mostly a pronoun or an article; as a digit it is a number like any other.
    if _DIGIT_ONE.search(reference) is None:
        known.add("1")
    return [unit for unit in dict.fromkeys(units(reference)) if unit not in known]


def recall(wanted: list[str], answer: str) -> float:
    """The share of `wanted` units that `answer` holds; `wanted` must not be empty."""
    held = set(units(answer))
    return sum(unit in held for unit in wanted) / len(wanted)


def overlap(reference: str, answer: str) -> float:
    """F1 of the two texts' units as multisets, in [0, 1]: for references without informative units ("Yes, it is.")."""
    left, right = units(reference), units(answer)
    remaining = list(right)
    shared = 0
    for unit in left:
        if unit in remaining:
            remaining.remove(unit)
            shared += 1
    return 2 * shared / (len(left) + len(right)) if left or right else 1.0


@cache
def frequent_words() -> frozenset[str]:
    """The bundled list, as units."""
    words = FREQUENT_WORDS.read_text(encoding="utf-8").split()
    return frozenset(unit for word in words for unit in units(word) if not unit.isdigit())


def _number(digits: str) -> str:
    """One spelling per value: thousands marks and trailing zeros go. "1.234.567" is read as thousands too."""
    groups = re.split(r"[.,]", digits)
    thousands = len(groups) > 1 and len(groups[0]) <= 3 and all(len(group) == 3 for group in groups[1:])
    if len(groups) > 2 or (thousands and "," in digits and "." not in digits):
        tail = groups[-1] if len(groups) > 2 and len(groups[-1]) != 3 else ""
        whole = "".join(groups[:-1] if tail else groups)
    else:
        whole, tail = groups[0], groups[1] if len(groups) == 2 else ""
    whole = whole.lstrip("0") or "0"
    tail = tail.rstrip("0")
    return f"{whole}.{tail}" if tail else whole


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
