"""Which suites an evaluation asks, in order: the target first, then the guards."""

from __future__ import annotations

from pathlib import Path

from evals.settings import EvalSettings
from evals.suites.base import Suite, Text
from evals.suites.format import Format
from evals.suites.heldout import HeldOut
from evals.suites.knowledge import Knowledge, guard_files
from evals.suites.perplexity import Perplexity


def build_suites(text: Text, heldout: Path, settings: EvalSettings, context_length: int) -> tuple[HeldOut, list[Suite]]:
    """The target suite and the guards. Raises `EvalDataError` when a file is not usable."""
    target = HeldOut(
        text,
        heldout,
        most_examples=settings.heldout_examples,
        most_per_session=settings.heldout_per_session,
        most_tokens=settings.reply_tokens,
        context_length=context_length,
        seed=settings.seed,
    )
    guards: list[Suite] = [
        Perplexity(text, most_tokens=settings.text_tokens),
        Knowledge(text, most_questions=settings.knowledge_questions, seed=settings.seed),
        Format(text),
    ]
    files = guard_files(settings.guard_dir) if settings.guard_dir is not None else []
    return target, guards + [_of_user(text, file, settings) for file in files]


def _of_user(text: Text, file: Path, settings: EvalSettings) -> Suite:
    return Knowledge(
        text,
        file,
        name=f"file:{file.stem}",
        kind="file",
        most_questions=settings.guard_questions,
        seed=settings.seed,
    )
