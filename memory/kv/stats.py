"""What KV memory tells about itself."""

from __future__ import annotations

from dataclasses import dataclass

from memory.kv.tiers.base import TierStats


@dataclass(frozen=True, slots=True)
class KVStats:
    """The state of the tiers, and what happened in this process since it opened the store."""

    ram: TierStats
    disk: TierStats
    """The folder's state: all processes together."""
    remote: TierStats
    """What this folder has moved to the remote tier."""
    hits: int
    """Matches that found at least one chunk."""
    misses: int
    """Matches that found none."""
    saved_tokens: int
    """Tokens taken in, each chunk once."""
    shared_tokens: int
    """Tokens whose save found them stored already by another owner, once for each chunk and owner."""
    restored_tokens: int
    """Tokens handed out after they were proven right."""
    ram_tokens: int
    """Those of the restored tokens that came from RAM."""
    disk_tokens: int
    """Those of the restored tokens that came from disk."""
    remote_tokens: int
    """Those of the restored tokens that came from the remote tier."""
    quarantined: int
    """Files refused: damaged, cut short, or not what they were asked for."""
    lost: int
    """Chunks that were gone, or expired, when they were to be read."""
    locked: int
    """Chunks that no key was found for."""
    expired: int
    """Chunks deleted because their time had passed."""
    read_errors: int
    write_errors: int
    index_errors: int
    index_rebuilds: int
    dropped: int
    """Chunks not written: the queue or the budget was full, or the disk was in trouble."""
    evictions: int
    """Chunks that left a tier for others."""
    waiting_bytes: int
    """Raw KV that waits for the background writer."""
    disk_trouble: str
    """Why nothing is written at the moment; empty while all is well."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes of disk per stored token; 0 while nothing is stored."""
        return self.disk.bytes / self.disk.tokens if self.disk.tokens else 0.0
