"""Engines that are closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.engine import load_engine
from serve.engine.engine import Engine
from serve.engine.settings import EngineSettings


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
