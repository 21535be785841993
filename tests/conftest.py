"""Fixtures every folder shares. One compute thread: two collapse when another process takes a core."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The bundled model as a Hugging Face folder; converted once and kept in the user's cache."""
    given = os.environ.get("KVLOOP_TEST_MODEL")
    if given:
        return Path(given)
    from serve.pull import DEFAULT_MODEL, pull

    return pull(DEFAULT_MODEL, Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kvloop" / "models")


@pytest.fixture(scope="session")
def tiny_model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 3 million parameters with the bundled model's tokenizer."""
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"), model_dir)
