"""Causal attention over one sequence's KV buffer, for a run of new tokens.

The query heads that share a KV head are folded into the query axis, so that each key is read once for all of them.
Few tokens (decode, the next turn of a session) go through `serve.kernels.few_queries` where the processor can, else one
token through torch's flash kernel. Longer runs (prefill) go in blocks of queries, head by head, each
against just the keys it may see: the scores of a block stay in the core's cache, and on CPUs with bf16 instructions
this takes little more than half of the flash kernel's time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.functional import scaled_dot_product_attention

from serve.kernels.few_queries import few_queries

QUERY_BLOCK = 128
SMALLEST_BLOCK = 16
LONG_KEYS = 16_384
"""Beyond so many keys a block has fewer queries: its scores, one for each query and key, must not grow with both."""


@dataclass(frozen=True)
class Block:
    """Queries [first, last) of a run see keys [key_first, key_last); `mask` is added to the scores of the last keys.

    `causal`: each query sees every key up to its own.
    """

    first: int
    last: int
    key_first: int
    key_last: int
    mask: torch.Tensor | None
    causal: bool


def plan_blocks(start: int, count: int, window: int | None, dtype: torch.dtype) -> list[Block]:
    """Blocks for `count` tokens at positions start, start+1, ...; the same for every layer with this window."""
    keys = start + count if window is None else min(window + count, start + count)
    size = max(SMALLEST_BLOCK, min(QUERY_BLOCK, QUERY_BLOCK * LONG_KEYS // keys))
    return [_plan_block(start, first, min(first + size, count), window, dtype) for first in range(0, count, size)]


def _plan_block(start: int, first: int, last: int, window: int | None, dtype: torch.dtype) -> Block:
    key_last = start + last
    key_first = 0 if window is None else max(0, start + first - window + 1)
    if last - first == 1:
        return Block(first, last, key_first, key_last, None, False)
    if window is None:
        return Block(first, last, key_first, key_last, _causal_mask(last - first, dtype), True)
    queries = torch.arange(start + first, key_last).unsqueeze(1)
    keys = torch.arange(key_first, key_last).unsqueeze(0)
    mask = _mask((keys > queries) | (keys <= queries - window), dtype)
    return Block(first, last, key_first, key_last, mask, False)


@lru_cache(maxsize=2 * QUERY_BLOCK)
def _causal_mask(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Each of `count` queries sees the keys up to its own: the same at every position."""
    return _mask(torch.ones(count, count, dtype=torch.bool).triu_(1), dtype)


def _mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def attend(queries: torch.Tensor, kv: torch.Tensor, blocks: list[Block], out: torch.Tensor) -> None:
    """Writes the attention of one run into `out` [tokens, heads, head_dim].

    queries: [tokens, heads, head_dim]; kv: [2, kv_heads, capacity, head_dim] with the run's own keys already in it.
    """
    for block in blocks:
        query, target = queries[block.first : block.last], out[block.first : block.last]
        keys, values = kv[:, :, block.key_first : block.key_last]
        if (block.mask is None or block.causal) and few_queries(query, keys, values, target):
            continue
        if block.mask is None:
            _attend_one(query, keys, values, target)
        else:
            _attend_block(query, keys, values, block.mask, target)


def _attend_one(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
    grouped = query.view(1, len(keys), -1, query.shape[-1])
    out.copy_(scaled_dot_product_attention(grouped, keys.unsqueeze(0), values.unsqueeze(0)).view(out.shape))


def _attend_block(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, out: torch.Tensor
) -> None:
    tokens, heads, head_dim = query.shape
    kv_heads = len(keys)
    by_head = (tokens, kv_heads, heads // kv_heads, head_dim)
    grouped = query.view(by_head).permute(1, 2, 0, 3) * head_dim**-0.5
    targets = out.view(by_head).permute(1, 2, 0, 3)
    for head in range(kv_heads):
        scores = torch.mm(grouped[head].reshape(-1, head_dim), keys[head].T).view(heads // kv_heads, tokens, -1)
        scores[..., -mask.shape[-1] :].add_(mask)
        weights = torch.softmax(scores, dim=-1).flatten(0, 1)
        targets[head].copy_(torch.mm(weights, values[head]).view(targets[head].shape))
