"""Forgetting: what a deletion removed, and from where.

A deletion names owners. It destroys their keys first, durably: from then on every byte of theirs is noise, wherever
it lies and whoever copied it. Only then are the bytes removed from each tier, so that a deletion that is interrupted
has deleted all the same, and asking again finishes it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a deletion removed. Chunks, besides `keys`."""

    keys: int = 0
    """Keys destroyed: owners that had stored something encrypted."""
    ram: int = 0
    waiting: int = 0
    """Out of the writer's queue, before they reached a disk."""
    disk: int = 0
    remote: int = 0
    remote_waiting: int = 0
    """Objects that the remote tier could not delete yet; that is tried again, and nobody can read them meanwhile."""
    quarantined: int = 0
    """Refused files."""
