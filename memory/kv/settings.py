"""Settings of KV memory. Each default is written here and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memory.kv.fidelity import Fidelity

MEBIBYTE = 1024**2
GIBIBYTE = 1024**3


class KVSettings(BaseModel):
    """How KV memory cuts, encodes, keeps and evicts. Budgets are in bytes; 0 switches a tier off."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    chunk_tokens: int = Field(default=256, ge=1)
    """Tokens in a full chunk. Part of every key: another value finds none of the chunks stored before."""

    min_tokens: int = Field(default=16, ge=1)
    """Shortest tail worth a file of its own, and shortest overlap worth reading a chunk for."""

    codec: Fidelity = "exact"
    """How new chunks are encoded. Chunks written by another codec stay readable."""

    ram_bytes: int = Field(default=1 * GIBIBYTE, ge=0)
    """Budget of the RAM tier, in bytes of raw KV."""

    disk_bytes: int = Field(default=8 * GIBIBYTE, ge=0)
    """Budget of the disk tier, in bytes of chunk files. It holds for all processes on one folder together."""

    disk_reserve_bytes: int = Field(default=512 * MEBIBYTE, ge=0)
    """Free space of the file system that KV memory leaves to others (the journal, for one)."""

    quarantine_bytes: int = Field(default=64 * MEBIBYTE, ge=0)
    """How much of the refused files is kept for inspection; the oldest go first. 0 deletes them at once."""

    queue_bytes: int = Field(default=512 * MEBIBYTE, ge=0)
    """Raw KV that may wait for the background writer. What does not fit is not written, and counted."""

    encryption: bool = True
    """Whether chunk files are encrypted (AES-256-GCM), each owner's with a key of its own. Forgetting an owner destroys
    that key. Files written without stay readable."""

    keyring: Path | None = None
    """File of the master key, made at the first use with access for its user only. None puts it beside the folder, as
    `<folder>.key`; `kvloop` fills in `keyring` in the home. The environment's `KVLOOP_KV_KEY` (base64 of 32 bytes)
    goes before it."""

    ttl_seconds: float | None = Field(default=None, gt=0)
    """Hard limit on the life of a chunk, counted from its storing. None keeps chunks until their room is needed."""

    upkeep_seconds: float = Field(default=60.0, ge=0)
    """Pause between two rounds of upkeep in the background: expiry, the ladder, the scrubber. 0 switches it off."""

    int8_after_seconds: float | None = Field(default=86_400.0, ge=0)
    """Seconds since the last use after which a chunk is rewritten as int8, where that rung is trusted; what was used in
    the last five minutes stays. None: only when the budget asks for it."""

    int4_after_seconds: float | None = Field(default=7 * 86_400.0, ge=0)
    """The same for int4."""

    compact_after_seconds: float | None = Field(default=30 * 86_400.0, ge=0)
    """The same for the compact rung."""

    int8_max_kl: float = Field(default=0.003, ge=0)
    """int8 is trusted for a model only where it was measured to cost no more than this: mean KL divergence of the
    next-token distribution, in nats."""

    int4_max_kl: float = Field(default=0.006, ge=0)
    """The same for int4."""

    compact_max_kl: float = Field(default=0.05, ge=0)
    """The same for the compact rung."""

    high_water: float = Field(default=0.9, gt=0, le=1)
    """Share of `disk_bytes` above which chunks worth least move down the ladder, before any is evicted."""

    remote_url: str | None = None
    """Where chunks go that the disk has no room for: a URL for fsspec, such as `s3://bucket/prefix`. None: nowhere."""

    remote_bytes: int = Field(default=64 * GIBIBYTE, ge=0)
    """Budget of the remote tier, in bytes of chunk files."""

    scrub_bytes_per_second: int = Field(default=4 * MEBIBYTE, ge=0)
    """How fast chunk files are verified in the background. 0 switches the scrubber off."""

    restore: Literal["cheapest", "always"] = "cheapest"
    """Which KV is restored of what is found: what takes less time to load than to compute, or all of it, so that how
    much is restored does not depend on how busy the machine was."""

    load_threads: int = Field(default=2, ge=1, le=64)
    """Threads that read, verify and decode the chunks of one load."""

    stall_seconds: float = Field(default=10.0, gt=0)
    """How long one chunk may take to come before the disk counts as hanging: the rest is computed, and the disk is left
    alone for `retry_seconds`."""

    writer_nice: int = Field(default=10, ge=0, le=19)
    """Niceness of the writer's thread, so that encoding yields to serving."""

    lock_seconds: float = Field(default=5.0, gt=0)
    """How long a write waits for another process that is writing to the same folder."""

    retry_seconds: float = Field(default=30.0, ge=0)
    """Pause between tries to write while the disk is full, read-only or gone."""

    @property
    def max_kl(self) -> dict[Fidelity, float]:
        """Mean KL up to which each rung is trusted."""
        return {
            "exact": float("inf"),
            "int8": self.int8_max_kl,
            "int4": self.int4_max_kl,
            "compact": self.compact_max_kl,
        }

    @property
    def after_seconds(self) -> dict[Fidelity, float | None]:
        """Age at which chunks move down to each rung."""
        return {
            "exact": None,
            "int8": self.int8_after_seconds,
            "int4": self.int4_after_seconds,
            "compact": self.compact_after_seconds,
        }

    @model_validator(mode="after")
    def _tail_fits_chunk(self) -> Self:
        if self.min_tokens > self.chunk_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed chunk_tokens ({self.chunk_tokens})")
        return self
