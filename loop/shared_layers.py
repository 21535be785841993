"""How many layers training leaves alone, so that KV memory shares their KV between the versions.

Invariant: the number is the one training uses for the same settings and model; a model that is not on disk yet, or
tells no number of layers, shares none.
"""

from __future__ import annotations

import json
from pathlib import Path

from train.settings import TrainSettings, first_trained_layer


def shared_layers(train: TrainSettings, model_dir: Path) -> int:
    """First layer that training touches, for the model in `model_dir`; 0 where that cannot be told.

    Raises `ValueError` when the settings leave no layer to train.
    """
    try:
        layers = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    except (OSError, ValueError, TypeError, KeyError):
        return 0
    return first_trained_layer(train, layers) if isinstance(layers, int) else 0


def local_folder(model: str, models_dir: Path) -> Path:
    """Where `pull` leaves `model`, or would leave the default one; a hub id is nowhere before it is pulled."""
    local = Path(model).expanduser()
    return local if local.is_dir() else models_dir / model
