"""The contract of a recipe.

`train.run` calls `trainer` once per process, with a base model that nothing else uses: the recipe may put a LoRA into
it and change its parameters' `requires_grad`, but not its weights. The trainer it returns has not started; after
`train()` its `model` is a PEFT model whose adapter is the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from train.packing import Row
from train.settings import TrainSettings


@dataclass(frozen=True)
class Materials:
    """What a recipe works with; `model`, `tokenizer` and `callbacks` are objects of `transformers`.

    `rows` holds the variants of each dataset row, in the order in which to show them.
    """

    model: Any
    tokenizer: Any
    rows: Sequence[Sequence[Row]]
    settings: TrainSettings
    base_weights_id: str
    replay_dir: Path
    work_dir: Path
    callbacks: Sequence[Any]


class Recipe(Protocol):
    """Raises `ValueError` when the model or the settings do not fit the recipe."""

    def trainer(self, materials: Materials) -> Any:
        """A `transformers` trainer, ready for `train()`."""
        ...


def first_trained_layer(settings: TrainSettings, layers: int) -> int:
    """The layer training starts at, for a model of `layers` layers. Raises `ValueError` when there is none left."""
    if settings.layers_from is None:
        return layers * 4 // 10
    if settings.layers_from >= layers:
        raise ValueError(f"layers_from is {settings.layers_from}, but the model has {layers} layers: give a lower one")
    return settings.layers_from
