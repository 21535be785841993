"""Attention over packs: each row attends to the shared start and to itself, and nothing else is computed.

A mask over the whole pack would compute every row against every other one and throw most of it away.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from train.packing import Layout

NAME = "kvloop_packed"
_MATERIALISED = 1 << 22
"""Up to this many scores a head are held in memory, which is quicker on CPUs than streaming them."""


def register() -> None:
    """Makes `packed_attention` known to `transformers` under `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Layout,
    scaling: float,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """`query` [1, heads, T, dim], `key` and `value` [1, KV heads, T, dim]; returns ([1, T, heads, dim], None).

    `transformers` passes its `attention_mask` through unchanged; here it is the pack's layout.
    """
    layout = attention_mask
    rows, length = layout.queries.shape
    queries = _gather(query, layout.queries)
    keys, values = _gather(key, layout.keys), _gather(value, layout.keys)
    if layout.visible.numel() > _MATERIALISED:
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=layout.visible[:, None], scale=scaling, enable_gqa=True
        )
    else:
        grouped = queries.reshape(rows, keys.shape[1], -1, queries.shape[-1])  # the heads that share a KV head
        scores = torch.matmul(grouped, keys.transpose(-1, -2)).float().view(rows, -1, length, layout.keys.shape[1])
        weights = torch.softmax(scores * scaling + layout.bias[:, None], -1).to(values.dtype)
        mixed = torch.matmul(weights.view(rows, keys.shape[1], -1, layout.keys.shape[1]), values).view(queries.shape)
    own = mixed.transpose(1, 2).flatten(0, 1).index_select(0, layout.places)
    return own[None], None


def _gather(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[segments, heads, length, dim] out of `states` [1, heads, T, dim] at `places` [segments, length]."""
    tokens = states[0].transpose(0, 1).index_select(0, places.flatten())
    return tokens.view(*places.shape, *tokens.shape[1:]).transpose(1, 2)
