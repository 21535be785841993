"""What a retrain is made of: the contracts of its stages, and what it says while it works and at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from pipelines.promotion import Aliases

StepName = Literal["curate", "train", "evaluate", "register", "promote"]
STEPS: tuple[StepName, ...] = ("curate", "train", "evaluate", "register", "promote")
Verdict = Literal["pass", "fail", "inconclusive"]
Result = Literal[
    "promoted", "refused", "inconclusive", "too few examples", "no held-out examples", "champion moved", "failed"
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """A sign of life of a run: a step began, went on (`done` of `total`), or finished (`result`)."""

    run_id: str
    step: StepName
    kind: Literal["started", "progress", "finished", "resumed"]
    done: float = 0.0
    total: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict)


Advance = Callable[[float, float, Mapping[str, Any]], None]
"""Called by a stage with done, total and details. May raise `LeaseLost`: the stage must stop then."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained adapter. The folder holds `manifest.json`; metrics are numbers by name."""

    adapter_dir: Path
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter with the name that reports call it by."""

    name: str
    path: Path


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The gate's verdict on a candidate, and where the reports are."""

    verdict: Verdict
    reasons: tuple[str, ...]
    metrics: dict[str, float]
    report_dir: Path
    stale_kl: float | None = None
    """KL of serving the candidate on the champion's KV, in nats per token; None where it was not measured."""


class TrainStage(Protocol):
    """Trains. Called again with the same `out_dir` after a kill: it continues, or returns what is there.

    Raises an exception whose text is the reason when it cannot.
    """

    def __call__(
        self, *, dataset: Path, out_dir: Path, name: str, parents: tuple[str, ...], advance: Advance
    ) -> Trained: ...


class EvaluateStage(Protocol):
    """Scores base, champion and candidate, lets the gate decide and writes the reports into `out_dir`.

    `champion` is None while the base model is champion. Repeatable: a second call may only cost time.
    """

    def __call__(
        self, *, heldout: Path, candidate: Adapter, champion: Adapter | None, out_dir: Path, advance: Advance
    ) -> Judged: ...


class VersionRegistry(Aliases, Protocol):
    """What a retrain needs of the registry."""

    def register(
        self,
        adapter_dir: Path,
        manifest: Mapping[str, Any],
        metrics: Mapping[str, float],
        report_dir: Path | None,
        run_name: str,
        tags: Mapping[str, str] | None = None,
    ) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended. `seconds` are those that each step took in the process that finished it."""

    run_id: str
    result: Result
    reasons: tuple[str, ...]
    version: str | None = None
    verdict: Verdict | None = None
    examples: int = 0
    heldout_examples: int = 0
    report: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def trained(self) -> bool:
        """True when a version came out of the run, whatever the verdict."""
        return self.version is not None

    @property
    def exit_code(self) -> int:
        """0 for a run that came to its end, a refusal included; 1 for one that failed."""
        return 1 if self.result == "failed" else 0

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {**asdict(self), "reasons": list(self.reasons), "trained": self.trained}

    def summary(self) -> str:
        """A few lines for a person."""
        name = f"version {self.version}" if self.version else f"run {self.run_id}"
        lines = [f"{name}: {self.result}", *(f"  {reason}" for reason in self.reasons)]
        if self.report:
            lines.append(f"  report: {self.report}")
        return "\n".join(lines)
