"""What a trainer process says on its standard output: one JSON object a line, and nothing else.

`progress` after each optimizer step; `failed` at most once, as the last line, with the reason. Success is not
announced: it is the finished folder and exit status 0.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Progress:
    """One optimizer step is done. `loss` in nats; `kl` is the divergence from the base, None without replay."""

    step: int
    steps: int
    loss: float
    kl: float | None = None


@dataclass(frozen=True)
class Failed:
    """The trainer gave up; `reason` is for the user."""

    reason: str


Event = Progress | Failed


def encode(event: Event) -> bytes:
    """One line."""
    name = "progress" if isinstance(event, Progress) else "failed"
    return json.dumps({"event": name, **asdict(event)}).encode() + b"\n"


def decode(line: bytes) -> Event | None:
    """The event of a line; None for an event of another version or a line cut off by a kill."""
    try:
        fields = json.loads(line)
        name = fields.pop("event")
        if name == "progress":
            return Progress(**fields)
        return Failed(**fields) if name == "failed" else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


class EventPipe:
    """The write end. Takes standard output for itself: what libraries print goes to standard error from then on."""

    def __init__(self) -> None:
        self._descriptor = os.dup(1)
        os.dup2(2, 1)

    def send(self, event: Event) -> None:
        """Writes one line at once; a reader that has gone is no reason to stop training."""
        try:
            os.write(self._descriptor, encode(event))
        except BrokenPipeError:
            return
