"""Runs packs through a Llama-family decoder, layer by layer.

Below `layers_from` nothing is trained, so those layers run without gradients. The output head (the widest matrix of a
small model) is applied only to the positions whose prediction counts.
"""

from __future__ import annotations

from typing import Any

import torch

from train import attention
from train.packing import Layout, Pack


class UnsupportedModel(ValueError):
    """The model is not a decoder of the Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3)."""


class Decoder:
    """The layers of a causal language model, with or without a LoRA in them.

    `model` is a `transformers` causal language model, not its PEFT wrapper; its layers are used in place.
    """

    def __init__(self, model: Any, layers_from: int) -> None:
        body = getattr(model, "model", None)
        if any(not hasattr(body, part) for part in ("embed_tokens", "layers", "norm", "rotary_emb")):
            raise UnsupportedModel(f"{type(model).__name__} is not a Llama-family decoder; give one that is")
        attention.register()
        self._body: Any = body
        self._config: Any = model.config
        self._head = model.get_output_embeddings()
        self._layers_from = layers_from

    def hidden(self, pack: Pack) -> torch.Tensor:
        """[T, hidden size]: the states that enter the output head, for every token of the pack."""
        positions = pack.positions[None]
        usual = self._config._attn_implementation
        self._config._attn_implementation = attention.NAME
        try:
            with torch.no_grad():
                states = self._body.embed_tokens(pack.token_ids[None])
                states = self._walk(0, self._layers_from, states, positions, pack.layout)
            states = self._walk(self._layers_from, None, states, positions, pack.layout)
        finally:
            self._config._attn_implementation = usual
        return torch.Tensor(self._body.norm(states)[0])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [positions, vocabulary] for states [positions, hidden size]."""
        return torch.Tensor(self._head(states)).float()

    def _walk(
        self, first: int, last: int | None, states: torch.Tensor, positions: torch.Tensor, layout: Layout
    ) -> torch.Tensor:
        rotary = self._body.rotary_emb(states, position_ids=positions)
        for layer in self._body.layers[first:last]:
            states = layer(states, attention_mask=layout, position_embeddings=rotary, position_ids=positions)
        return states
