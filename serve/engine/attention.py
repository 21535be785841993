"""Causal attention over one sequence's KV buffer, for a run of new tokens.

A run of one token (decode) folds the query heads that share a KV head into the query axis: torch's CPU flash
kernel then reads each key once instead of once per query head. Longer runs (prefill) go in blocks of queries, each
against just the keys it may see, so that half of the square is never computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

QUERY_BLOCK = 128


@dataclass(frozen=True)
class Block:
    """Queries [first, last) of a run see keys [key_first, key_last); `mask` [last-first, keys] is added to scores."""

    first: int
    last: int
    key_first: int
    key_last: int
    mask: torch.Tensor | None


def plan_blocks(start: int, count: int, window: int | None, dtype: torch.dtype) -> list[Block]:
    """Blocks for `count` tokens at positions start, start+1, ...; the same for every layer with this window."""
    blocks = []
    for first in range(0, count, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, count)
        key_last = start + last
        key_first = 0 if window is None else max(0, start + first - window + 1)
        mask = None
        if last - first > 1:
            queries = torch.arange(start + first, key_last).unsqueeze(1)
            keys = torch.arange(key_first, key_last).unsqueeze(0)
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        blocks.append(Block(first, last, key_first, key_last, mask))
    return blocks


def attend(queries: torch.Tensor, kv: torch.Tensor, blocks: list[Block], out: torch.Tensor) -> None:
    """Writes the attention of one run into `out` [tokens, heads, head_dim].

    queries: [tokens, heads, head_dim]; kv: [2, kv_heads, capacity, head_dim] with the run's own keys already in it.
    """
    kv_heads = kv.shape[1]
    for block in blocks:
        key, value = kv[:, None, :, block.key_first : block.key_last]
        if block.mask is None:
            grouped = queries[block.first].view(1, kv_heads, -1, queries.shape[-1])
            out[block.first] = scaled_dot_product_attention(grouped, key, value).view(out.shape[1:])
        else:
            query = queries[block.first : block.last].transpose(0, 1).unsqueeze(0)
            seen = scaled_dot_product_attention(query, key, value, attn_mask=block.mask, enable_gqa=True)
            out[block.first : block.last] = seen[0].transpose(0, 1)
