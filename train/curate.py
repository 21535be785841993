"""From demonstrations in the journal to a dataset.

Invariants: a row of the training split only ever comes from a session of that split, and nothing nearly like a held-out
example stays in it; no row comes from a session with memories, for its history lacks what they say; one conversation
has one answer, the latest; with two sources or more none gives more than its share; personal data is scrubbed from all
that is written; the same journal gives the same bytes.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field

from memory.journal import DemonstrationRow, Journal
from train.dataset import DatasetCard, Example, Lineage, Message, encode_rows, rows_digest, write_dataset
from train.scrub import scrub
from train.similar import SimilarTexts

_KEPT_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")


class CurateSettings(BaseModel):
    """What may go into a dataset."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    window_days: float | None = Field(default=None, gt=0)
    """Only corrections of the last so many days are trained on; without it, all of them."""
    near_duplicate: float = Field(default=0.6, gt=0, le=1)
    """Similarity (Jaccard, runs of three words of question and answer) to a held-out example from which on a training
    example is dropped."""
    max_source_share: float = Field(default=0.5, gt=0, le=1)
    """Largest share of the examples that one source may give, where there is more than one source."""


@dataclass(frozen=True)
class _Candidate:
    example: Example
    number: int


def curate(
    journal: Journal,
    folder: Path,
    settings: CurateSettings,
    until: float | None = None,
    after_feedback: int = 0,
) -> DatasetCard:
    """Builds the dataset of everything up to `until` (UTC seconds) in `folder`: rows, held-out rows, card.

    `after_feedback` is a feedback number; examples of later feedback count as new. Held-out rows have no window.
    """
    dropped: Counter[str] = Counter()
    scrubbed: Counter[str] = Counter()
    since = None
    if settings.window_days is not None and until is not None:
        since = until - settings.window_days * 86_400
    train: list[_Candidate] = []
    heldout: list[_Candidate] = []
    for row in journal.demonstrations(until=until):
        if row.memory_ids:
            dropped["with memories"] += 1
        elif row.split == "eval":
            heldout.append(_candidate(row, scrubbed))
        elif since is None or row.feedback.created_at > since:
            train.append(_candidate(row, scrubbed))
        else:
            dropped["before the window"] += 1
    heldout = _latest_answers(heldout, Counter())
    train = _latest_answers(train, dropped)
    train = _unlike_heldout(train, heldout, settings.near_duplicate, dropped)
    train = _capped(train, settings.max_source_share, dropped)
    examples = [candidate.example for candidate in train]
    card = DatasetCard(
        digest=rows_digest(encode_rows(examples)),
        examples=len(examples),
        heldout_examples=len(heldout),
        new_examples=sum(candidate.number > after_feedback for candidate in train),
        since=since,
        until=until,
        dropped=dict(dropped),
        scrubbed=dict(scrubbed),
        sources=dict(Counter(_source(candidate) for candidate in train)),
        sessions=_sessions(examples),
    )
    write_dataset(folder, examples, [candidate.example for candidate in heldout], card)
    return card


def _sessions(examples: Iterable[Example]) -> tuple[tuple[str, str], ...]:
    used = {(example.lineage.tenant, name) for example in examples for name in example.lineage.sessions}
    return tuple(sorted(used))


def _candidate(row: DemonstrationRow, scrubbed: Counter[str]) -> _Candidate:
    given = row.feedback
    lineage = Lineage(
        session=given.session_id,
        response=row.response.id,
        feedback=given.id,
        tenant=given.tenant,
        source=given.source,
        sessions=row.sessions,
    )
    messages = tuple(scrub(_plain(message), scrubbed) for message in row.history)
    completion = {"role": "assistant", "content": scrub(row.answer.strip(), scrubbed)}
    return _Candidate(Example(messages=messages, completion=completion, lineage=lineage), given.number)


def _plain(message: Message) -> Message:
    """A message as chat templates take it: known keys only, content parts joined to one text."""
    kept = {key: message[key] for key in _KEPT_KEYS if message.get(key) is not None}
    kept["content"] = _text(message.get("content"))
    return kept


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def _latest_answers(candidates: Sequence[_Candidate], dropped: Counter[str]) -> list[_Candidate]:
    """One candidate for each conversation: the latest. Order of the journal is kept."""
    latest: dict[str, _Candidate] = {}
    for candidate in candidates:
        key = _conversation_key(candidate.example)
        earlier = latest.pop(key, None)
        if earlier is not None:
            same = _normal(_answer(earlier)) == _normal(_answer(candidate))
            dropped["duplicate" if same else "corrected again later"] += 1
        latest[key] = candidate
    return list(latest.values())


def _unlike_heldout(
    candidates: Sequence[_Candidate], heldout: Sequence[_Candidate], threshold: float, dropped: Counter[str]
) -> list[_Candidate]:
    known = SimilarTexts(_question_and_answer(candidate) for candidate in heldout)
    kept = [candidate for candidate in candidates if known.nearest(_question_and_answer(candidate)) < threshold]
    if len(kept) < len(candidates):
        dropped["nearly a held-out example"] += len(candidates) - len(kept)
    return kept


def _capped(candidates: Sequence[_Candidate], share: float, dropped: Counter[str]) -> list[_Candidate]:
    """Takes examples from the largest sources until none has more than `share` (or an equal part, if that is more)."""
    by_source: defaultdict[str, list[_Candidate]] = defaultdict(list)
    for candidate in candidates:
        by_source[_source(candidate)].append(candidate)
    if len(by_source) < 2:
        return list(candidates)
    limit = _most_per_source([len(group) for group in by_source.values()], max(share, 1 / len(by_source)))
    chosen: set[str] = set()
    for group in by_source.values():
        # Drawn by a hash: neither the first nor the last to flood the journal gains by it.
        drawn = sorted(group, key=lambda candidate: blake3(candidate.example.lineage.feedback.encode()).digest())
        chosen |= {candidate.example.lineage.feedback for candidate in drawn[:limit]}
    kept = [candidate for candidate in candidates if candidate.example.lineage.feedback in chosen]
    if len(kept) < len(candidates):
        dropped["over its source's share"] += len(candidates) - len(kept)
    return kept


def _most_per_source(sizes: Sequence[int], share: float) -> int:
    """The highest limit per source that keeps each source's part of the whole at most `share`."""

    def fits(limit: int) -> bool:
        return limit <= share * sum(min(size, limit) for size in sizes) + 1e-9

    return next(limit for limit in range(max(sizes), -1, -1) if fits(limit))


def _source(candidate: _Candidate) -> str:
    return f"{candidate.example.lineage.tenant}/{candidate.example.lineage.source}"


def _answer(candidate: _Candidate) -> str:
    return str(candidate.example.completion["content"])


def _question_and_answer(candidate: _Candidate) -> str:
    asked = [str(message["content"]) for message in candidate.example.messages if message.get("role") == "user"]
    return f"{asked[-1] if asked else ''} {_answer(candidate)}"


def _conversation_key(example: Example) -> str:
    """Equal for conversations that differ in case and white space only. Tenants are apart."""
    said = [[message.get("role"), _normal(json.dumps(message, sort_keys=True))] for message in example.messages]
    return json.dumps([example.lineage.tenant, said])


def _normal(text: str) -> str:
    return " ".join(text.lower().split())
