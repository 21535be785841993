"""A model on which remembering pays: computing a token takes several times what loading its KV takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_tiny_model

LAYERS = 10
SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "head_dim": 32,
}


@pytest.fixture(scope="session")
def deep_model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the bundled model's tokenizer; on the tiny one of two layers memory would only cost time."""
    return make_tiny_model(tmp_path_factory.mktemp("deep-model"), model_dir, **SIZES)
