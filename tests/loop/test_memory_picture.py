"""The picture of what each rung costs: every rung is named, and the noise is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loop.memory_picture import PictureError, draw


def record(codec: str, size: float, kl: float, base: str = "a" * 64) -> dict[str, Any]:
    sizes = {"bytes_per_token": size, "ratio": 23040 / size, "noise_kl": 0.0016}
    return {"weights_id_base": base, "codec": codec, "kl_mean": kl, **sizes}


LADDER = [
    record("exact", 16000, 0.0),
    record("int8", 11700, 0.0018),
    record("int4", 6300, 0.004),
    record("compact", 2500, 0.04),
]


def test_every_rung_and_the_noise_are_named(tmp_path: Path) -> None:
    draw([*LADDER, record("exact", 100, 0.0, "b" * 64)], tmp_path / "new" / "ladder.svg")
    drawn = (tmp_path / "new" / "ladder.svg").read_text()
    for words in ("exact", "int8", "int4", "compact", "1.97x", "9.22x", "model aaaaaaaa", "model bbbbbbbb"):
        assert words in drawn
    assert "noise of exact KV, 0.0016" in drawn
    assert "bytes per token" in drawn


def test_a_png_is_one(tmp_path: Path) -> None:
    draw(LADDER, tmp_path / "ladder.PNG")
    data = (tmp_path / "ladder.PNG").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def test_nothing_measured_is_said(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="kvloop memory measure"):
        draw([], tmp_path / "ladder.svg")


@pytest.mark.parametrize("name", ["ladder.gif", "ladder", "svg"])
def test_other_kinds_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PictureError, match=r"\.png or \.svg"):
        draw(LADDER, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_matplotlib_is_imported_by_drawing_alone() -> None:
    code = "import loop.memory_picture, loop.memory_commands, sys; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
