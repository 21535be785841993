"""The demo's catalogue: invented products, each with one fact that no model can know beforehand.

Invariants: a fact's values occur in none of its questions and in no other fact, so an answer that holds one of
them was learned; held-out questions are never trained on and do not change once a recipe was tuned.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources

from pydantic import BaseModel, ConfigDict


class TrainingPhrasing(BaseModel):
    """One customer's question with the corrected answer, a full sentence that holds the fact's first value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    question: str
    answer: str


class Fact(BaseModel):
    """One product's fact. `values` are the spellings accepted in an answer; the first is the canonical one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    product: str
    values: tuple[str, ...]
    training: tuple[TrainingPhrasing, ...]
    heldout: tuple[str, ...]

    def answered_by(self, answer: str) -> bool:
        """True if `answer` holds one of the values as whole words, in any case: 147 seconds is not 47 seconds."""
        return any(_whole_words(value).search(answer) for value in self.values)


class Catalogue(BaseModel):
    """All facts of the demo."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    facts: tuple[Fact, ...]


@cache
def load_catalogue() -> Catalogue:
    """The bundled catalogue: 24 facts with 8 training and 3 held-out phrasings each."""
    text = resources.files(__package__).joinpath("catalogue.json").read_text(encoding="utf-8")
    return Catalogue.model_validate(json.loads(text))


@cache
def _whole_words(value: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.]){re.escape(value)}(?!\w)", re.IGNORECASE)
