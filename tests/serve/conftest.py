"""Tiny models for everything under `serve`, built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a variant of `tests.serve.tiny`."""
    from tests.serve.tiny import build_model

    root = tmp_path_factory.mktemp("models")

    def get(variant: str) -> Path:
        folder = root / variant
        return folder if folder.exists() else build_model(folder, variant)

    return get


@pytest.fixture(scope="session")
def tiny_model(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("llama")


@pytest.fixture(scope="session")
def tiny_adapter(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    from tests.serve.tiny import build_adapter

    return build_adapter(tmp_path_factory.mktemp("adapters") / "a", tiny_model, seed=1)
