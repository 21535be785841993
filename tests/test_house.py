"""The house rules that a machine can check: sizes, folders, and that the heavy imports stay out of the light parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("memory", "serve", "train", "evals", "pipelines", "loop")
SOURCES = sorted(path for package in (*PACKAGES, "tests", "benchmarks") for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_says_what_lives_there(package: str) -> None:
    for folder in [ROOT / package, *(path for path in (ROOT / package).rglob("*") if path.is_dir())]:
        if folder.name != "__pycache__" and any(folder.glob("*.py")):
            assert (folder / "__init__.py").read_text().startswith('"""'), folder


@pytest.mark.parametrize(
    "module", ["loop.cli", "serve.gateway.app", "memory.kv.store", "memory.journal", "loop.supervisor"]
)
def test_light_parts_start_without_heavy_packages(module: str) -> None:
    heavy = ["torch", "transformers", "trl", "peft", "mlflow", "datasets"]
    code = f"import {module}, sys; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
