"""PEFT LoRA adapters: read from safetensors, checked tensor by tensor, merged into copies of what they touch.

An adapter that would not be applied exactly and completely is refused, never served as the base: its tensors must be
those its own config announces, with the shapes of this model, and nothing else; of the config, only settings known
to be applied here or to change nothing may be set.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from serve.engine.config import DecoderConfig
from serve.engine.errors import AdapterError
from serve.engine.linear import Linear
from serve.engine.model import Decoder, Layer
from serve.weights_id import adapter_digest

PREFIX = "base_model.model."
APPLIED = frozenset({"r", "lora_alpha", "use_rslora", "target_modules", "layers_to_transform", "layers_pattern"})
HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "inference_mode",
        "init_lora_weights",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva")  # the others change the base's weights as well


@dataclass(frozen=True)
class Delta:
    """One projection's change: `up` [out, rank] @ `down` [rank, in], in fp32, scaled already."""

    up: torch.Tensor
    down: torch.Tensor

    def add_to(self, weight: torch.Tensor) -> None:
        """Adds the change to `weight` [out, in] in place, rounding once."""
        weight.copy_(torch.addmm(weight.float(), self.up, self.down))


@dataclass(frozen=True)
class Adapter:
    """A checked adapter: its content digest and its deltas by module name (`model.layers.0.self_attn.q_proj`)."""

    digest: str
    deltas: dict[str, Delta]

    @property
    def first_layer(self) -> int:
        """The lowest layer that it changes: those below compute as the base's do."""
        return min(int(name.split(".")[2]) for name in self.deltas)

    def merge_into(self, decoder: Decoder) -> Decoder:
        """Returns a decoder with the deltas merged; layers without any are shared with `decoder`."""
        layers = tuple(self._merge_layer(layer, index, decoder.config) for index, layer in enumerate(decoder.layers))
        return replace(decoder, layers=layers)

    def _merge_layer(self, layer: Layer, index: int, config: DecoderConfig) -> Layer:
        changed: dict[str, Any] = {}
        for field, parts in fused_modules(config).items():
            deltas = [self.deltas.get(f"model.layers.{index}.{name}") for name, _, _ in parts]
            if any(deltas):
                old: Linear = getattr(layer, field)
                weight = old.dense()
                first = 0
                for delta, (_, outputs, _) in zip(deltas, parts, strict=True):
                    if delta is not None:
                        delta.add_to(weight[first : first + outputs])
                    first += outputs
                changed[field] = Linear(weight, old.bias)
        return replace(layer, **changed) if changed else layer


def fused_modules(config: DecoderConfig) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """For each `Linear` of a `Layer`: the modules it holds, in order, as (name, outputs, inputs)."""
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden, config.intermediate
    return {
        "qkv": tuple((f"self_attn.{name}_proj", size, hidden) for name, size in (("q", query), ("k", key), ("v", key))),
        "output": (("self_attn.o_proj", hidden, query),),
        "gate_up": (("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden)),
        "down": (("mlp.down_proj", hidden, inner),),
    }


def read_adapter(folder: Path, config: DecoderConfig, base_weights_id: str) -> Adapter:
    """Reads and checks the adapter in `folder`. Raises `AdapterError` saying what does not fit."""
    path = folder / "adapter_model.safetensors"
    settings = _read_json(folder / "adapter_config.json")
    if settings is None:
        raise AdapterError(f"{folder} has no adapter_config.json: give a PEFT adapter folder")
    if not path.is_file():
        raise AdapterError(f"{folder} has no adapter_model.safetensors; pickled adapters (.bin) are never loaded")
    _check_settings(settings)
    _check_base(folder, base_weights_id)
    modules = _target_modules(settings, config)
    tensors = _read_tensors(path, int(settings["r"]), modules)
    scale = settings["lora_alpha"] / (settings["r"] ** 0.5 if settings.get("use_rslora") else settings["r"])
    deltas = {name: Delta(tensors[name][1] * scale, tensors[name][0]) for name in modules}
    return Adapter(adapter_digest(folder), deltas)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        loaded = json.loads(path.read_text())
    except ValueError as error:
        raise AdapterError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise AdapterError(f"{path} is not a JSON object")
    return loaded


def _check_settings(settings: dict[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type {settings.get('peft_type')!r} is not served; only LORA")
    if settings.get("bias", "none") != "none":
        raise AdapterError(f"bias {settings['bias']!r} is not served; train with bias='none'")
    for key in sorted(settings.keys() - APPLIED - HARMLESS):
        if settings[key]:
            raise AdapterError(f"{key}={settings[key]!r} is not served by merging: train without it")
    if settings.get("init_lora_weights", True) not in PLAIN_INITS:
        raise AdapterError(f"init_lora_weights={settings['init_lora_weights']!r} changes the base: train without it")
    if settings.get("layers_pattern") not in (None, [], "layers", ["layers"]):
        raise AdapterError(f"layers_pattern {settings['layers_pattern']!r} names no list of layers of this model")
    for key in ("r", "lora_alpha"):
        if not isinstance(settings.get(key), int | float) or settings[key] <= 0:
            raise AdapterError(f"adapter_config.json has {key}={settings.get(key)!r}; it must be above 0")


def _check_base(folder: Path, base_weights_id: str) -> None:
    """A manifest that names the base it was trained on is believed."""
    manifest = _read_json(folder / "manifest.json") or {}
    trained_on = manifest.get("base_weights_id")
    if trained_on is not None and trained_on != base_weights_id:
        raise AdapterError(f"the adapter was trained on base {trained_on}, this worker serves {base_weights_id}")


def _target_modules(settings: dict[str, Any], config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """The modules that the adapter's config announces, as PEFT reads it, with (outputs, inputs)."""
    only = settings.get("layers_to_transform")
    layers = range(config.layers) if only is None else [only] if isinstance(only, int) else only
    names = [part for parts in fused_modules(config).values() for part in parts]
    every = {f"model.layers.{layer}.{name}": (outputs, inputs) for layer in layers for name, outputs, inputs in names}
    targets = settings.get("target_modules")
    if not targets:
        raise AdapterError("adapter_config.json names no target_modules")
    if targets == "all-linear":
        return every
    if isinstance(targets, str):
        chosen = {name: shape for name, shape in every.items() if re.fullmatch(targets, name)}
    else:
        chosen = {}
        for target in targets:
            found = {name: shape for name, shape in every.items() if f".{name}".endswith(f".{target}")}
            if not found:
                raise AdapterError(f"target module {target!r} is no projection of this model's layers")
            chosen |= found
    if not chosen:
        raise AdapterError(f"target_modules {targets!r} match no projection of this model's layers")
    return chosen


def _read_tensors(
    path: Path, rank: int, modules: dict[str, tuple[int, int]]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns (lora_A, lora_B) in fp32 for each module; the file must hold exactly those."""
    expected: dict[str, tuple[int, int]] = {}
    for name, (outputs, inputs) in modules.items():
        expected[f"{PREFIX}{name}.lora_A.weight"] = (rank, inputs)
        expected[f"{PREFIX}{name}.lora_B.weight"] = (outputs, rank)
    tensors: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            _check_names(set(file.keys()), set(expected))
            for name, shape in expected.items():
                tensor = file.get_tensor(name)
                if tensor.shape != shape:
                    raise AdapterError(f"tensor {name} has shape {list(tensor.shape)}, this model needs {list(shape)}")
                if not tensor.isfinite().all():
                    raise AdapterError(f"tensor {name} holds numbers that are not finite")
                tensors[name] = tensor.float()
    except SafetensorError as error:
        raise AdapterError(f"{path} is no valid safetensors file: {error}") from error
    return {
        name: (tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"]) for name in modules
    }


def _check_names(found: set[str], expected: set[str]) -> None:
    missing, extra = sorted(expected - found), sorted(found - expected)
    if missing:
        raise AdapterError(f"{len(missing)} tensors that its config announces are missing, {missing[0]} first")
    if extra:
        raise AdapterError(
            f"{len(extra)} tensors would be ignored, {extra[0]} first: its config does not announce them"
        )
