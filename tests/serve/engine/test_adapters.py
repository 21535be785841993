"""Adapters: merged as PEFT merges them, or refused."""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve.engine.adapters import read_adapter
from serve.engine.engine import Engine
from serve.engine.errors import AdapterError, VersionNotFound
from serve.engine.model import Run
from serve.engine.request import Event, Request, Sampling, TokenEvent
from serve.engine.weights import load_decoder
from tests.serve.tiny import build_adapter, build_model, load_reference, merged_reference, prompt, reference_logits

StartEngine = Callable[..., Engine]
GREEDY = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
ALL_SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ALL_SEVEN, "r": 8, "lora_alpha": 16},
        {"target_modules": ["q_proj", "up_proj"], "use_rslora": True},
        {"target_modules": "all-linear"},
        {"target_modules": ["o_proj", "gate_proj"], "layers_to_transform": [1, 2], "layers_pattern": "layers"},
        {"target_modules": r".*\.layers\.2\..*\.(k_proj|down_proj)"},
    ],
)
def test_merging_is_pefts(tmp_path: Path, tiny_model: Path, options: dict[str, Any]) -> None:
    folder = build_adapter(tmp_path / "adapter", tiny_model, **options)
    decoder = load_decoder(tiny_model, torch.float32)
    merged = read_adapter(folder, decoder.config, "base").merge_into(decoder)
    token_ids = prompt(40)
    with torch.inference_mode():
        logits = merged.logits(merged.forward([Run(token_ids, 0, merged.new_kv(40))]))
        plain = decoder.logits(decoder.forward([Run(token_ids, 0, decoder.new_kv(40))]))
    torch.testing.assert_close(
        logits, reference_logits(merged_reference(folder, tiny_model), token_ids), rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(plain, reference_logits(load_reference(tiny_model), token_ids), rtol=1e-4, atol=2e-4)
    assert (logits - plain).abs().max() > 0.1


def test_untouched_layers_are_shared(tmp_path: Path, tiny_model: Path) -> None:
    folder = build_adapter(tmp_path / "adapter", tiny_model, layers_to_transform=[2], target_modules=["v_proj"])
    decoder = load_decoder(tiny_model, torch.float32)
    merged = read_adapter(folder, decoder.config, "base").merge_into(decoder)
    assert merged.layers[0] is decoder.layers[0]
    assert merged.layers[2].down is decoder.layers[2].down
    assert merged.layers[2].qkv is not decoder.layers[2].qkv


def edit_config(folder: Path, **change: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def drop_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[sorted(tensors)[0]]


def add_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 32)


def reshape_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors[sorted(tensors)[0]] = torch.zeros(4, 33)


def poison_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors[sorted(tensors)[0]][0, 0] = float("nan")


@pytest.mark.parametrize(
    ("edit", "message"),
    [(drop_one, "missing"), (add_one, "ignored"), (reshape_one, "shape"), (poison_one, "not finite")],
)
def test_tensors_that_do_not_match_are_refused(
    tmp_path: Path, tiny_model: Path, tiny_adapter: Path, edit: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(tiny_adapter, folder)
    edit_tensors(folder, edit)
    with pytest.raises(AdapterError, match=message):
        read_adapter(folder, load_decoder(tiny_model, torch.float32).config, "base")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"target_modules": ["c_attn"]}, "c_attn"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": ["q_proj"]}, "ignored"),
        ({"r": 0}, "r=0"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"layers_pattern": "blocks"}, "blocks"),
        ({"some_new_variant": {"x": 1}}, "some_new_variant"),
    ],
)
def test_settings_that_would_not_be_applied_are_refused(
    tmp_path: Path, tiny_model: Path, tiny_adapter: Path, change: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(tiny_adapter, folder)
    edit_config(folder, **change)
    with pytest.raises(AdapterError, match=message):
        read_adapter(folder, load_decoder(tiny_model, torch.float32).config, "base")


def test_pickles_damage_and_foreign_bases_are_refused(tmp_path: Path, tiny_model: Path, tiny_adapter: Path) -> None:
    config = load_decoder(tiny_model, torch.float32).config
    with pytest.raises(AdapterError, match="adapter_config"):
        read_adapter(tmp_path, config, "base")
    folder = tmp_path / "adapter"
    shutil.copytree(tiny_adapter, folder)
    (folder / "manifest.json").write_text(json.dumps({"base_weights_id": "another"}))
    with pytest.raises(AdapterError, match="another"):
        read_adapter(folder, config, "base")
    (folder / "manifest.json").write_text("{")
    with pytest.raises(AdapterError, match="JSON"):
        read_adapter(folder, config, "base")
    (folder / "manifest.json").unlink()
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(AdapterError, match="safetensors"):
        read_adapter(folder, config, "base")
    torch.save({}, folder / "adapter_model.bin")
    weights.unlink()
    with pytest.raises(AdapterError, match="never loaded"):
        read_adapter(folder, config, "base")


def test_base_and_adapter_serve_side_by_side(start_engine: StartEngine, tiny_model: Path, tiny_adapter: Path) -> None:
    engine = start_engine()
    engine.load_adapter("a", tiny_adapter)
    requests = [Request(name, prompt(20), GREEDY) for name in ("base", "a", "base", "a")]
    replies = [each.choices[0].token_ids for each in engine.generate(requests)]
    for reply, model in zip(
        replies[:2], (load_reference(tiny_model), merged_reference(tiny_adapter, tiny_model)), strict=True
    ):
        logits = reference_logits(model, prompt(20) + reply)
        assert reply == tuple(logits[19:-1].argmax(-1).tolist())
    assert replies[:2] == replies[2:]
    assert replies[0] != replies[1]


def test_names_stand_for_one_content(
    start_engine: StartEngine, tmp_path: Path, tiny_model: Path, tiny_adapter: Path
) -> None:
    engine = start_engine(max_resident_adapters=2)
    first = engine.load_adapter("a", tiny_adapter)
    copy = tmp_path / "copy"
    shutil.copytree(tiny_adapter, copy)
    assert engine.load_adapter("a", copy) is first, "the same content under another path is the same version"
    other = build_adapter(tmp_path / "other", tiny_model, seed=2)
    for name in ("a", "base"):
        with pytest.raises(AdapterError, match="in use"):
            engine.load_adapter(name, other)
    engine.load_adapter("b", other)
    with pytest.raises(AdapterError, match="2 adapters are resident"):
        engine.load_adapter("c", tiny_adapter)
    assert [version.name for version in engine.versions.list()] == ["base", "a", "b"]
    assert engine.unload_adapter("b") == 0
    with pytest.raises(VersionNotFound):
        engine.unload_adapter("b")
    with pytest.raises(AdapterError, match="base"):
        engine.unload_adapter("base")


def test_unloading_waits_for_the_last_request(start_engine: StartEngine, tiny_adapter: Path) -> None:
    engine = start_engine()
    engine.load_adapter("a", tiny_adapter)
    expected = engine.generate([Request("a", prompt(5), Sampling(max_tokens=200, temperature=0, ignore_eos=True))])
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit([Request("a", prompt(5), Sampling(max_tokens=200, temperature=0, ignore_eos=True))], events.put)
    first = events.get(timeout=20)
    assert engine.unload_adapter("a") == 1
    with pytest.raises(VersionNotFound):
        engine.generate([Request("a", prompt(5), GREEDY)])
    tokens = [first] + [events.get(timeout=20) for _ in range(199)]
    assert [event.token_id for event in tokens if isinstance(event, TokenEvent)] == list(
        expected[0].choices[0].token_ids
    )
    assert [version.name for version in engine.versions.list()] == ["base"]


def test_an_adapter_of_another_model_is_refused(start_engine: StartEngine, tmp_path: Path, tiny_adapter: Path) -> None:
    folder = build_model(tmp_path / "model", "qwen2")
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    alien = build_adapter(tmp_path / "alien", folder, layers_to_transform=[0], target_modules=["q_proj"])
    edit_config(alien, layers_to_transform=[9])
    engine = start_engine()
    with pytest.raises(AdapterError):
        engine.load_adapter("alien", alien)
    assert [version.name for version in engine.versions.list()] == ["base"]
