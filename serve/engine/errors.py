"""What can go wrong, as types: each message says what was wrong and what to do about it."""

from __future__ import annotations


class EngineError(RuntimeError):
    """Anything the engine refuses or fails at."""


class UnsupportedModel(EngineError):
    """The model is not of a kind this engine computes exactly."""


class WeightsError(EngineError):
    """The model folder's tensors are missing, pickled, or do not fit its config."""


class AdapterError(EngineError):
    """The adapter cannot be served: wrong names, shapes, file format, or base model."""


class VersionNotFound(EngineError):
    """No resident version has this name."""


class InvalidRequest(EngineError):
    """The request can never be served as it is."""


class QueueFull(EngineError):
    """Too many requests wait; try again after `retry_after` seconds."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"{waiting} sequences are waiting already; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class EngineClosed(EngineError):
    """The engine was closed while the request was in it."""
