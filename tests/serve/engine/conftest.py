"""Tiny models, built once, and engines that are closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.engine import load_engine
from serve.engine.engine import Engine
from serve.engine.settings import EngineSettings
from tests.serve.tiny import build_adapter, build_model


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a variant of `tests.serve.tiny`."""
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
    return build_adapter(tmp_path_factory.mktemp("adapters") / "a", tiny_model, seed=1)


@pytest.fixture
def start_engine(tiny_model: Path) -> Iterator[Callable[..., Engine]]:
    """Starts an engine in fp32 on the tiny model; keyword arguments are settings."""
    engines = []

    def start(**settings: Any) -> Engine:
        engine = load_engine(EngineSettings(**({"model": tiny_model, "dtype": "float32"} | settings)))
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()
