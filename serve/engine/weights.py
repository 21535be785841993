"""Reads a decoder's weights from safetensors. Pickled weights are never opened: loading them runs code.

Every tensor of the folder must be one the decoder uses, with the shape its config says: a folder of another
architecture that happens to share names is refused, not half loaded.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from serve.engine.config import DecoderConfig, read_config
from serve.engine.errors import UnsupportedModel, WeightsError
from serve.engine.linear import Linear
from serve.engine.model import Decoder, Layer
from serve.engine.rope import RopeTable

IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # derived from the config; old checkpoints store it


def load_decoder(folder: Path, dtype: torch.dtype, context: int | None = None, shared_layers: int = 0) -> Decoder:
    """Loads the model in `folder`, computing in `dtype`; `context` shortens the model's own limit, in tokens.

    `shared_layers` is how many layers from the bottom adapters are expected to leave alone; 0: nothing is made of that.
    """
    config = read_config(folder)
    if shared_layers and (not 0 < shared_layers < config.layers or config.hidden % 2):
        raise UnsupportedModel(
            f"kv_shared_layers={shared_layers} does not fit {config.layers} layers of {config.hidden} numbers: "
            "it must be below the number of layers, and the hidden size even"
        )
    length = config.context if context is None else min(context, config.context)
    with _Tensors(folder, dtype) as tensors:
        embedding = tensors.take("model.embed_tokens.weight", config.vocabulary, config.hidden)
        layers = tuple(_load_layer(tensors, config, index) for index in range(config.layers))
        norm = tensors.take("model.norm.weight", config.hidden)
        if config.tied:
            tensors.ignore("lm_head.weight")
            head = embedding
        else:
            head = tensors.take("lm_head.weight", config.vocabulary, config.hidden)
        tensors.require_all_used()
    rope = RopeTable(config.rope, config.head_dim, length, dtype)
    return Decoder(config, dtype, embedding, layers, norm, Linear(head), rope, shared_layers)


def _load_layer(tensors: _Tensors, config: DecoderConfig, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def linear(parts: list[tuple[str, int]], inputs: int, bias: bool) -> Linear:
        weights = [tensors.take(f"{prefix}{name}.weight", outputs, inputs) for name, outputs in parts]
        biases = [tensors.take(f"{prefix}{name}.bias", outputs) for name, outputs in parts] if bias else None
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def norm(name: str, size: int) -> torch.Tensor:
        return tensors.take(f"{prefix}{name}.weight", size)

    names = [("self_attn.q_proj", query), ("self_attn.k_proj", key), ("self_attn.v_proj", key)]
    return Layer(
        attention_norm=norm("input_layernorm", config.hidden),
        qkv=linear(names, config.hidden, config.qkv_bias),
        output=linear([("self_attn.o_proj", config.hidden)], query, config.output_bias),
        mlp_norm=norm("post_attention_layernorm", config.hidden),
        gate_up=linear(
            [("mlp.gate_proj", config.intermediate), ("mlp.up_proj", config.intermediate)],
            config.hidden,
            config.mlp_bias,
        ),
        down=linear([("mlp.down_proj", config.hidden)], config.intermediate, config.mlp_bias),
        query_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        key_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
    )


class _Tensors:
    """All tensors of a folder's safetensors files, each taken once, by name and with a known shape."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._stack = ExitStack()
        self._files: dict[str, safe_open] = {}
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise WeightsError(f"{folder} has no *.safetensors; pickled weights (.bin, .pt) are never loaded")
        try:
            for path in paths:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                self._files.update(dict.fromkeys(file.keys(), file))
        except SafetensorError as error:
            self._stack.close()
            raise WeightsError(f"{path} is damaged ({error}): fetch the model again") from error
        self._unused = {name for name in self._files if not name.endswith(IGNORED_SUFFIXES)}

    def __enter__(self) -> _Tensors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        file = self._files.get(name)
        if file is None:
            raise WeightsError(f"{self._folder} has no tensor {name}: its config.json describes another model")
        tensor: torch.Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        if tensor.shape != shape:
            raise WeightsError(f"tensor {name} has shape {list(tensor.shape)}, config.json says {list(shape)}")
        self._unused.discard(name)
        return tensor.to(self._dtype)

    def ignore(self, name: str) -> None:
        self._unused.discard(name)

    def require_all_used(self) -> None:
        if self._unused:
            some = ", ".join(sorted(self._unused)[:3])
            raise WeightsError(f"{self._folder} has {len(self._unused)} tensors this engine would ignore ({some}, ...)")
