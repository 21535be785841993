"""Settings of KV memory. Each default is written here and nowhere else."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MEBIBYTE = 1024**2
GIBIBYTE = 1024**3


class KVSettings(BaseModel):
    """How KV memory cuts, encodes, keeps and evicts. Budgets are in bytes; 0 switches a tier off."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    chunk_tokens: int = Field(default=256, ge=1)
    """Tokens in a full chunk. Part of every key: another value finds none of the chunks stored before."""

    min_tokens: int = Field(default=16, ge=1)
    """Shortest tail worth a file of its own, and shortest overlap worth reading a chunk for."""

    codec: str = "exact"
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

    load_threads: int = Field(default=2, ge=1, le=64)
    """Threads that read, verify and decode the chunks of one load."""

    writer_nice: int = Field(default=10, ge=0, le=19)
    """Niceness of the writer's thread, so that encoding yields to serving."""

    lock_seconds: float = Field(default=5.0, gt=0)
    """How long a write waits for another process that is writing to the same folder."""

    retry_seconds: float = Field(default=30.0, ge=0)
    """Pause between tries to write while the disk is full, read-only or gone."""

    @model_validator(mode="after")
    def _tail_fits_chunk(self) -> Self:
        if self.min_tokens > self.chunk_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed chunk_tokens ({self.chunk_tokens})")
        return self
