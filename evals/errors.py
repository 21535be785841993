"""What can go wrong in an evaluation. Every error says what was wrong and what to do next."""

from __future__ import annotations


class EvalError(Exception):
    """An evaluation cannot go on."""


class EvalDataError(EvalError):
    """An examples file, a guard file or a set of scores is not usable."""


class WorkerStartFailed(EvalError):
    """The evaluation's own worker did not come up; the message ends with the tail of its log."""


class WorkerLost(EvalError):
    """The evaluation's own worker exited while it was asked; the message ends with the tail of its log."""
