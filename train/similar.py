"""Finds texts that are nearly the same: Jaccard similarity of their runs of three words.

Method: Broder, "On the resemblance and containment of documents" (1997), computed exactly through an inverted index.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

_WORD = re.compile(r"\w+")
_RUN = 3
Shingles = frozenset[tuple[str, ...]]


def shingles(text: str) -> Shingles:
    """The runs of three words of a text, in lower case; a shorter text is one run."""
    words = _WORD.findall(text.lower())
    return frozenset(tuple(words[start : start + _RUN]) for start in range(max(1, len(words) - _RUN + 1)))


class SimilarTexts:
    """A set of texts that can be asked whether it holds one nearly like another."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._sizes: list[int] = []
        self._holders: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, text in enumerate(texts):
            runs = shingles(text)
            self._sizes.append(len(runs))
            for run in runs:
                self._holders[run].append(number)

    def nearest(self, text: str) -> float:
        """The highest similarity of any text of the set to this one: 0 for nothing shared, 1 for the same words."""
        runs = shingles(text)
        shared: Counter[int] = Counter()
        for run in runs:
            shared.update(self._holders.get(run, ()))
        return max((count / (len(runs) + self._sizes[number] - count) for number, count in shared.items()), default=0.0)
