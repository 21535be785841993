"""Settings of evaluations and of the gate. Each default is written here and nowhere else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EvalSettings(BaseModel):
    """How much is asked of each model, and how its answers are got."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    heldout_examples: int = Field(default=60, ge=1)
    """Most held-out demonstrations asked of each model."""
    heldout_per_session: int = Field(default=4, ge=1)
    """Most demonstrations asked of one session, so that no session outweighs the others."""
    reply_tokens: int = Field(default=64, ge=1)
    """Longest reply to a held-out question, in tokens; shorter where the demonstration is short."""
    knowledge_questions: int = Field(default=120, ge=1)
    """Most general questions asked."""
    guard_dir: Path | None = None
    """Folder with guard files of your own: *.jsonl with {"question", "choices", "answer"} lines, one guard a file."""
    guard_questions: int = Field(default=100, ge=1)
    """Most questions asked of each guard file of your own."""
    text_tokens: int = Field(default=160, ge=2)
    """Longest piece of each general text that is scored, in tokens."""
    seed: int = 0
    """Chooses which examples are asked where there are more than allowed."""
    stale_probes: int = Field(default=8, ge=0)
    """Most conversations, and most general texts, on which the candidate is measured over KV of the version that
    serves; 0 measures nothing, and policy `reuse` is never allowed then."""
    batch: int = Field(default=32, ge=1)
    """Prompts asked of the worker at the same time."""
    threads: int = Field(default=1, ge=0)
    """Compute threads of the evaluation's own worker; 0 takes every core."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the evaluation's own worker computes in; the same as serving, for what is proven is what is served."""
    start_seconds: float = Field(default=120.0, gt=0)
    """How long the evaluation's own worker may take to start."""
    patience_seconds: float = Field(default=300.0, gt=0)
    """How long an overloaded worker is asked again before the evaluation gives up."""


class GateSettings(BaseModel):
    """What counts as proof."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    alpha: float = Field(default=0.025, gt=0, lt=0.5)
    """Chance of a false promotion that is accepted; one-sided, so 0.025 goes with a two-sided 95% interval."""
    power: float = Field(default=0.8, gt=0, lt=1)
    """Chance of success used when saying how much more data is needed."""
    smallest_gain: float = Field(default=0.02, ge=0, lt=1)
    """Gain on the target, as a share of the full score, below which a version is not worth a swap."""
    perplexity_ratio: float = Field(default=1.06, gt=1)
    """Largest accepted ratio of the candidate's perplexity to the base model's on general texts."""
    knowledge_margin: float = Field(default=0.05, gt=0, lt=1)
    """Largest accepted loss on general questions, as a share of the full score."""
    format_margin: float = Field(default=0.15, gt=0, lt=1)
    """Largest accepted loss in following instructions on form, as a share of the full score."""
    file_margin: float = Field(default=0.05, gt=0, lt=1)
    """Largest accepted loss on each guard file of your own, as a share of the full score."""
    min_clusters: int = Field(default=8, ge=2)
    """Fewest sessions (or independent examples) per metric; with fewer the verdict is never `pass`."""
    min_examples: int = Field(default=10, ge=2)
    """Fewest examples per metric; with fewer the verdict is never `pass`."""
    required_guards: tuple[str, ...] = ("knowledge", "perplexity", "format")
    """Guards without which the verdict is never `pass`."""

    def margin(self, kind: str) -> float:
        """The accepted loss of a guard of this kind, in the unit of its scores. Raises KeyError for another kind."""
        return {
            "perplexity": math.log(self.perplexity_ratio),
            "knowledge": self.knowledge_margin,
            "format": self.format_margin,
            "file": self.file_margin,
        }[kind]
