"""Settings of a training job: what the trainer process is told, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

RecipeName = Literal["sft-kl", "sft"]


class TrainSettings(BaseModel):
    """How an adapter is trained. Frozen; a value out of range raises `pydantic.ValidationError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    learning_rate: float = Field(default=1.5e-3, gt=0, le=0.1)
    """Peak learning rate of AdamW; it warms up, then falls linearly to zero."""
    epochs: float = Field(default=7.0, gt=0, le=100)
    """Passes over the dataset."""
    batch_rows: int = Field(default=4, ge=1, le=1024)
    """Dataset rows per optimizer step."""
    rank: int = Field(default=8, ge=1, le=512)
    """Rank of the LoRA matrices on all seven projections of a layer."""
    alpha: float = Field(default=16.0, gt=0, le=4096)
    """LoRA scale: the update is multiplied by alpha / rank."""
    layers_from: int | None = Field(default=None, ge=0)
    """First layer that is trained; KV of the layers below stays exactly valid. None: four tenths up the stack."""
    kl_weight: float = Field(default=3.0, ge=0, le=100)
    """Weight of the KL divergence to the base on replay rows (recipe sft-kl only)."""
    replay_raw_rows: int = Field(default=96, ge=1, le=4096)
    """Raw texts sampled from the base for replay."""
    replay_raw_tokens: int = Field(default=48, ge=2, le=1024)
    """Tokens sampled per raw text."""
    replay_chat_rows: int = Field(default=64, ge=1, le=4096)
    """Chat answers taken from the base for replay."""
    replay_chat_tokens: int = Field(default=32, ge=2, le=1024)
    """Tokens kept of each chat answer."""
    raw_rows_per_step: int = Field(default=2, ge=1, le=64)
    """Raw replay rows in each optimizer step."""
    chat_rows_per_step: int = Field(default=1, ge=1, le=64)
    """Chat replay rows in each optimizer step."""
    warmup_share: float = Field(default=0.05, ge=0, le=1)
    """Share of the steps in which the learning rate rises."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    max_row_tokens: int = Field(default=1024, ge=8, le=131072)
    """Longer rows are left out, with a warning that says how many."""
    max_pack_tokens: int = Field(default=2048, ge=8, le=131072)
    """Rows of a step are laid out in sequences of at most this many tokens; bounds the memory of activations."""
    word_dropout: float = Field(default=0.5, ge=0, lt=1)
    """Share of a question's words left out each time a row is seen again; words its answer repeats always stay."""
    threads: int = Field(default=2, ge=0, le=1024)
    """Compute threads; 0 takes every core."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of initial weights and of the order of rows."""
    niceness: int = Field(default=10, ge=0, le=19)
    """How far the trainer steps back for other processes."""
    max_seconds: float = Field(default=3600.0, gt=0)
    """The job fails when it takes longer."""


def first_trained_layer(settings: TrainSettings, layers: int) -> int:
    """The layer training starts at, for a model of `layers` layers. Raises `ValueError` when there is none left.

    The KV of the layers below it is the base model's under every adapter trained so: KV memory shares it.
    """
    if settings.layers_from is None:
        return layers * 4 // 10
    if settings.layers_from >= layers:
        raise ValueError(f"layers_from is {settings.layers_from}, but the model has {layers} layers: give a lower one")
    return settings.layers_from


class TrainJob(BaseModel):
    """One training job, as the trainer process reads it from a file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = Field(default="adapter", min_length=1, max_length=200)
    """Name written to the manifest."""
    model_dir: Path
    """Base model: a Hugging Face folder with safetensors."""
    dataset: Path
    """JSONL of {"messages", "completion"} rows; a `dataset.json` card beside it gives its digest."""
    replay_dir: Path
    """Folder that keeps what was sampled from each base, shared by jobs."""
    recipe: RecipeName = "sft-kl"
    """How to train: with KL replay against the base, or plainly."""
    parents: tuple[str, ...] = ()
    """Versions this one follows, for the manifest."""
    settings: TrainSettings = TrainSettings()
    """Numbers of the recipe."""
