"""What an engine is told. Free of torch: processes that only pass settings on read it too."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from memory.kv.settings import KVSettings


class EngineSettings(BaseModel):
    """Settings of one engine: one model, one KV memory."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: Path | None = None
    """Folder of the base model, in Hugging Face's format; `kvloop up` fills it in."""
    served_name: str = Field(default="base", min_length=1)
    """Name of the base model in requests."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What weights, activations and KV are computed and stored in."""
    threads: int = Field(default=1, ge=0)
    """Compute threads; 0 takes every core. More than one is slower when another process needs a core."""
    context_length: int | None = Field(default=None, ge=1)
    """Longest prompt and reply together, in tokens; the model's own limit when empty."""
    kv_folder: Path | None = None
    """Folder of the KV memory; nothing is remembered when empty."""
    kv: KVSettings = KVSettings()
    """The KV memory's own settings."""
    kv_buffer_bytes: int = Field(default=4 * 2**30, ge=2**20)
    """Budget of the buffers of running sequences, in bytes; a request waits until its longest reply fits."""
    kv_warm_bytes: int = Field(default=256 * 2**20, ge=0)
    """Memory of buffers that stays committed for the next sequences: a restored session need not wait for the system to
    find it."""
    kv_shared_layers: int = Field(default=0, ge=0)
    """How many layers from the bottom adapters leave alone. Their KV is stored apart and survives a promotion: only the
    layers above are computed anew. 0 stores all layers together; another value finds none of what was stored before.
    `kvloop` fills in the layers that training leaves alone (`train.layers_from`)."""
    max_batch: int = Field(default=32, ge=1)
    """Most sequences that run at the same time."""
    queue_limit: int = Field(default=256, ge=1)
    """Sequences that may wait for a place; beyond it requests are refused with 429."""
    prefill_chunk: int = Field(default=512, ge=1)
    """Prompt tokens computed in one step while nobody waits for a next token."""
    prefill_chunk_busy: int = Field(default=64, ge=1)
    """Prompt tokens computed in one step beside running replies: small, so that they keep flowing."""
    prefill_chunk_background: int = Field(default=128, ge=1)
    """Prompt tokens computed in one step of a background request: it gives way to others after each."""
    max_resident_adapters: int = Field(default=4, ge=0)
    """Adapters held in memory at the same time, each merged into its own copy of the projections it touches."""
