"""Runs packs through a Llama-family decoder, layer by layer.

Below `layers_from` nothing is trained, so what enters that layer is a function of the row alone: it is computed
once without gradients and kept, up to a byte budget. The output head (the widest matrix of a small model) is applied
only to the positions whose prediction counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from train.packing import Pack


class UnsupportedModel(ValueError):
    """The model is not a decoder of the Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3)."""


class Decoder:
    """The layers of a causal language model, with or without a LoRA in them.

    `model` is a `transformers` causal language model, not its PEFT wrapper; its layers are used in place.
    """

    def __init__(self, model: Any, layers_from: int, cache_bytes: int) -> None:
        body = getattr(model, "model", None)
        if any(not hasattr(body, part) for part in ("embed_tokens", "layers", "norm", "rotary_emb")):
            raise UnsupportedModel(f"{type(model).__name__} is not a Llama-family decoder; give one that is")
        self._body: Any = body
        self._head = model.get_output_embeddings()
        self._layers_from = layers_from
        self._cache_bytes = cache_bytes
        self._cached: dict[int, torch.Tensor] = {}

    def hidden(self, pack: Pack) -> torch.Tensor:
        """[T, hidden size]: the states that enter the output head, for every token of the pack."""
        positions = pack.positions[None]
        mask = pack.allowed[None, None]
        states = self._entering(pack, positions, mask)
        return torch.Tensor(self._body.norm(self._walk(self._layers_from, None, states, positions, mask))[0])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [positions, vocabulary] for states [positions, hidden size]."""
        return torch.Tensor(self._head(states)).float()

    def _walk(
        self, first: int, last: int | None, states: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        rotary = self._body.rotary_emb(states, position_ids=positions)
        for layer in self._body.layers[first:last]:
            states = layer(states, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
        return states

    @torch.no_grad()
    def _entering(self, pack: Pack, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[1, T, hidden size]: what enters the first trained layer."""
        known = [self._cached.get(row.key) for row in pack.rows]
        if self._layers_from and all(states is not None for states in known):
            return self._assemble(pack, [states for states in known if states is not None])
        states = self._body.embed_tokens(pack.token_ids[None])
        if self._layers_from:
            states = self._walk(0, self._layers_from, states, positions, mask)
            self._remember(pack, states[0])
        return torch.Tensor(states)

    def _assemble(self, pack: Pack, known: Sequence[torch.Tensor]) -> torch.Tensor:
        start = [known[pack.sharing.index(True)][: pack.shared]] if pack.shared else []
        own = [states[pack.shared if shares else 0 :] for states, shares in zip(known, pack.sharing, strict=True)]
        return torch.cat([*start, *own])[None]

    def _remember(self, pack: Pack, states: torch.Tensor) -> None:
        for row, shares, (begin, end) in zip(pack.rows, pack.sharing, pack.spans, strict=True):
            size = len(row.token_ids) * states.shape[-1] * states.element_size()
            if row.key not in self._cached and size <= self._cache_bytes:
                own = states[begin:end]
                self._cached[row.key] = torch.cat([states[: pack.shared], own]) if shares else own.clone()
                self._cache_bytes -= size
