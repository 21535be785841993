"""Weights ids follow content, not names, places or the order in which a set was saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from serve.weights_id import adapter_digest, base_weights_id, weights_id
from tests.serve.tiny import build_adapter, build_model


def edit(path: Path, **change: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_base_id_follows_content(tmp_path: Path, tiny_model: Path) -> None:
    first = base_weights_id(tiny_model)
    assert len(bytes.fromhex(first)) == 32
    copy = tmp_path / "elsewhere"
    shutil.copytree(tiny_model, copy)
    edit(copy / "config.json", _name_or_path="other", transformers_version="9")
    assert base_weights_id(copy) == first
    edit(copy / "config.json", rms_norm_eps=1e-3)
    assert base_weights_id(copy) != first
    assert base_weights_id(build_model(tmp_path / "seed", seed=5)) != first
    (copy / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        base_weights_id(copy)


def test_one_flipped_bit_is_another_model(tmp_path: Path, tiny_model: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert base_weights_id(copy) != base_weights_id(tiny_model)


def test_adapter_digest_follows_content(tmp_path: Path, tiny_model: Path, tiny_adapter: Path) -> None:
    first = adapter_digest(tiny_adapter)
    copy = tmp_path / "copy"
    shutil.copytree(tiny_adapter, copy)
    modules = json.loads((copy / "adapter_config.json").read_text())["target_modules"]
    edit(copy / "adapter_config.json", target_modules=modules[::-1], base_model_name_or_path="elsewhere")
    assert adapter_digest(copy) == first
    edit(copy / "adapter_config.json", lora_alpha=9)
    assert adapter_digest(copy) != first
    assert adapter_digest(build_adapter(tmp_path / "other", tiny_model, seed=7)) != first
    (copy / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        adapter_digest(copy)


def test_ids_of_base_and_adapter_differ() -> None:
    assert weights_id("aa") == "aa"
    assert weights_id("aa", "bb") == "aa+bb"
