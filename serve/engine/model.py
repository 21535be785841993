"""One decoder for the Llama family, computed on tokens of several sequences at once.

Linear layers see the tokens of all runs in one matrix; attention goes run by run, over each sequence's own KV buffer.
A forward writes keys and values at exactly the positions of its tokens and touches nothing else in a buffer.

Where layers are shared (`Decoder.shared_layers` = L > 0), what enters layer L is kept beside the KV. Under weights that
agree below L, a forward from layer L on reads it, and gives bit for bit what a whole forward of those tokens would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from serve.engine.attention import Block, attend, plan_blocks
from serve.engine.config import DecoderConfig
from serve.engine.linear import Linear
from serve.engine.rope import RopeTable, rotate_


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence: ids at positions start, start+1, ...

    `kv` is that sequence's buffer [layers, 2, kv_heads, capacity, head_dim]; [:, :, :, :start] must be valid.
    `entering` [1, 2, 1, capacity, hidden / 2] is its buffer for what enters layer L, the first half of each state, then
    the second; None where that is not kept.
    """

    token_ids: Sequence[int]
    start: int
    kv: torch.Tensor
    entering: torch.Tensor | None = None

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Layer:
    """The weights of one transformer block; query, key and value are one product, so are gate and up."""

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class Decoder:
    """A model version's weights. Immutable; versions share every tensor that an adapter leaves alone."""

    config: DecoderConfig
    dtype: torch.dtype
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head: Linear
    rope: RopeTable
    shared_layers: int = 0

    def kv_shape(self, capacity: int) -> tuple[int, int, int, int, int]:
        """Shape of the KV of `capacity` tokens."""
        return (self.config.layers, 2, self.config.kv_heads, capacity, self.config.head_dim)

    def new_kv(self, capacity: int) -> torch.Tensor:
        """Returns an uninitialised KV buffer; its memory is committed by the system as positions are written."""
        return torch.empty(self.kv_shape(capacity), dtype=self.dtype)

    def new_entering(self, capacity: int) -> torch.Tensor | None:
        """Returns an uninitialised buffer for what enters the first layer that is not shared; None where none is."""
        return self.lay_out(torch.empty(capacity * self.buffer_bytes_per_token, dtype=torch.uint8), capacity)[1]

    def lay_out(self, memory: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The buffers of a sequence of `capacity` tokens in `memory` (bytes, `buffer_bytes_per_token` for each): its
        KV, and what enters the first layer that is not shared, None where no layer is."""
        kv_bytes = capacity * self.kv_bytes_per_token
        kv = memory[:kv_bytes].view(self.dtype).view(self.kv_shape(capacity))
        if not self.shared_layers:
            return kv, None
        rest = memory[kv_bytes : capacity * self.buffer_bytes_per_token].view(self.dtype)
        return kv, rest.view(1, 2, 1, capacity, self.config.hidden // 2)

    @property
    def context(self) -> int:
        """Most tokens a sequence can have."""
        return self.rope.positions

    @property
    def kv_bytes_per_token(self) -> int:
        config = self.config
        return config.layers * 2 * config.kv_heads * config.head_dim * self.dtype.itemsize

    @property
    def buffer_bytes_per_token(self) -> int:
        """Bytes of a sequence's buffers: KV, and what enters the first layer that is not shared."""
        return self.kv_bytes_per_token + (self.config.hidden * self.dtype.itemsize if self.shared_layers else 0)

    def forward(self, runs: Sequence[Run], first_layer: int = 0) -> torch.Tensor:
        """Computes all runs and returns their final hidden states [tokens, hidden], in order, normed.

        `first_layer` is 0, or `shared_layers`: then KV of the layers below it and what enters it must be in the runs'
        buffers already, and only the layers from it on are computed.
        """
        config = self.config
        if first_layer not in (0, self.shared_layers):
            raise ValueError(f"a forward begins at layer 0 or {self.shared_layers}, not at {first_layer}")
        positions = torch.cat([torch.arange(run.start, run.start + len(run.token_ids)) for run in runs])
        cos, sin = self.rope.at(positions)
        plans = {window: self._plan(runs, window) for window in set(config.windows)}
        bounds = _bounds(runs)
        hidden = _stored(runs) if first_layer else self._embed(runs)
        for index, layer in enumerate(self.layers[first_layer:], start=first_layer):
            if index == self.shared_layers and not first_layer:
                _store(runs, bounds, hidden)
            normed = F.rms_norm(hidden, (config.hidden,), layer.attention_norm, config.norm_eps)
            heads = self._heads(layer, normed, cos, sin)
            mixed = self._attend(index, heads, runs, bounds, plans[config.windows[index]])
            hidden.add_(layer.output(mixed))
            normed = F.rms_norm(hidden, (config.hidden,), layer.mlp_norm, config.norm_eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden.add_(layer.down(F.silu(gate).mul_(up)))
        return F.rms_norm(hidden, (config.hidden,), self.final_norm, config.norm_eps)

    def _embed(self, runs: Sequence[Run]) -> torch.Tensor:
        return F.embedding(torch.tensor([token for run in runs for token in run.token_ids]), self.embedding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns fp32 [tokens, vocabulary] for rows of `forward`'s result."""
        return self.head(hidden).float()

    def _plan(self, runs: Sequence[Run], window: int | None) -> list[list[Block]]:
        return [plan_blocks(run.start, len(run.token_ids), window, self.dtype) for run in runs]

    def _heads(self, layer: Layer, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Returns [tokens, heads + 2 kv_heads, head_dim]: queries and keys normed and rotated, then values."""
        config = self.config
        heads = layer.qkv(normed).view(len(normed), -1, config.head_dim)
        rotated = heads[:, : config.heads + config.kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = rotated[:, : config.heads], rotated[:, config.heads :]
            query.copy_(F.rms_norm(query, (config.head_dim,), layer.query_norm, config.norm_eps))
            key.copy_(F.rms_norm(key, (config.head_dim,), layer.key_norm, config.norm_eps))
        rotate_(rotated, cos, sin)
        return heads

    def _attend(
        self,
        index: int,
        heads: torch.Tensor,
        runs: Sequence[Run],
        bounds: Sequence[tuple[int, int]],
        plans: Sequence[list[Block]],
    ) -> torch.Tensor:
        """Stores the new keys and values, then attends; returns [tokens, heads * head_dim]."""
        config = self.config
        queries = heads[:, : config.heads]
        new = heads[:, config.heads :].view(len(heads), 2, config.kv_heads, config.head_dim).permute(1, 2, 0, 3)
        mixed = torch.empty(queries.shape, dtype=heads.dtype)
        for run, (first, last), blocks in zip(runs, bounds, plans, strict=True):
            kv = run.kv[index]
            kv[:, :, run.start : run.start + last - first] = new[:, :, first:last]
            attend(queries[first:last], kv, blocks, mixed[first:last])
        return mixed.view(len(heads), -1)


def _bounds(runs: Sequence[Run]) -> list[tuple[int, int]]:
    bounds, first = [], 0
    for run in runs:
        bounds.append((first, first + len(run.token_ids)))
        first += len(run.token_ids)
    return bounds


def _store(runs: Sequence[Run], bounds: Sequence[tuple[int, int]], hidden: torch.Tensor) -> None:
    """Keeps what enters the first layer that is not shared, for the runs that have a buffer for it."""
    half = hidden.shape[-1] // 2
    for run, (first, last) in zip(runs, bounds, strict=True):
        if run.entering is not None:
            run.entering[0, 0, 0, run.start : run.end] = hidden[first:last, :half]
            run.entering[0, 1, 0, run.start : run.end] = hidden[first:last, half:]


def _stored(runs: Sequence[Run]) -> torch.Tensor:
    """What `_store` kept of these runs' tokens, [tokens, hidden]."""
    parts = []
    for run in runs:
        if run.entering is None:
            raise ValueError("a run without a buffer of what enters the layer cannot begin there")
        parts.append(run.entering[0, :, 0, run.start : run.end].transpose(0, 1).flatten(1))
    return torch.cat(parts) if len(parts) > 1 else parts[0].clone()
