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
