"""The shape of a decoder, read from a Hugging Face `config.json`.

Anything that this engine would not compute exactly is refused here by name, never approximated.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serve.engine.errors import UnsupportedModel, WeightsError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; the last four fields are used by kind `llama3` only."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes in elements, `windows` in tokens: one sliding window (or None for full attention) per layer."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    context: int
    eos_ids: tuple[int, ...]

    @property
    def rope_json(self) -> str:
        """Canonical text of the rope config, for content identities."""
        return json.dumps(asdict(self.rope), sort_keys=True)

    @property
    def attention_json(self) -> str:
        """Canonical text of everything else that shapes attention, for content identities."""
        facts = {"heads": self.heads, "windows": self.windows, "scale": self.head_dim**-0.5, "qk_norm": self.qk_norm}
        return json.dumps(facts, sort_keys=True)


def read_config(folder: Path) -> DecoderConfig:
    """Reads `folder/config.json` (and the end ids of `generation_config.json`).

    Raises `WeightsError` when there is none, `UnsupportedModel` for what this engine does not compute.
    """
    raw = _read_json(folder / "config.json")
    if raw is None:
        raise WeightsError(f"{folder} has no config.json: give a Hugging Face model folder")
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(f"model_type {family!r} is not served; known families: {', '.join(FAMILIES)}")
    _refuse_unknown(raw)
    heads = int(raw["num_attention_heads"])
    attention_bias = bool(raw.get("attention_bias", False))
    return DecoderConfig(
        family=family,
        layers=int(raw["num_hidden_layers"]),
        hidden=int(raw["hidden_size"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        intermediate=int(raw["intermediate_size"]),
        vocabulary=int(raw["vocab_size"]),
        norm_eps=float(raw["rms_norm_eps"]),
        rope=_read_rope(raw),
        windows=_read_windows(raw),
        qkv_bias=family == "qwen2" or (family != "mistral" and attention_bias),
        output_bias=family in ("llama", "qwen3") and attention_bias,
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        tied=bool(raw.get("tie_word_embeddings", False)),
        context=int(raw["max_position_embeddings"]),
        eos_ids=_read_eos(raw, _read_json(folder / "generation_config.json") or {}),
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    loaded = json.loads(path.read_text())
    if not isinstance(loaded, dict):
        raise WeightsError(f"{path} is not a JSON object")
    return loaded


def _refuse_unknown(raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r} is not served; only 'silu'")
    if raw.get("quantization_config"):
        raise UnsupportedModel("quantised weights are not served: convert the model to bfloat16 safetensors first")
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise UnsupportedModel("partial_rotary_factor other than 1 is not served")


def _read_rope(raw: dict[str, Any]) -> RopeConfig:
    """Reads both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""
    found = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(found.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, factor=float(found["factor"]))
    if kind == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            factor=float(found["factor"]),
            low_freq_factor=float(found["low_freq_factor"]),
            high_freq_factor=float(found["high_freq_factor"]),
            original_context=int(found["original_max_position_embeddings"]),
        )
    raise UnsupportedModel(f"rope type {kind!r} is not served; known: default, linear, llama3")


def _read_windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    layers, window = int(raw["num_hidden_layers"]), raw.get("sliding_window")
    if raw["model_type"].startswith("qwen") and not raw.get("use_sliding_window", False):
        window = None
    if window is None or raw["model_type"] == "llama":
        return (None,) * layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = int(raw.get("max_window_layers", layers)) if raw["model_type"].startswith("qwen") else 0
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != layers:
        raise UnsupportedModel(f"layer_types {sorted(unknown) or len(kinds)} is not served")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _read_eos(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    for value in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))
