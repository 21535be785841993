"""What a fresh process does before its first request, so that this one does not pay for it.

The first forward has oneDNN choose and build its kernels, and the first use of a large buffer has the system find its
memory. Computing a few tokens also tells the cost model how fast this machine is with this model, before anything has
to be decided by it.
"""

from __future__ import annotations

import time

import torch

from memory.kv.cost import CostModel
from serve.engine.model import Decoder, Run
from serve.engine.pages import PageBudget
from serve.engine.settings import EngineSettings

TOKENS = 64
TURN_TOKENS = 16
"""A short message: it loads the kernel that such a turn uses."""
MULTIPLY_RATE, ATTEND_RATE, READ_RATE = 2e11, 5e10, 8e9
"""What a core does in a second, roughly: operations in matrix products and in attention, and bytes read."""


def warm_up(decoder: Decoder, settings: EngineSettings, budget: PageBudget, cost: CostModel) -> None:
    """Computes a few tokens, commits a buffer, and tells `cost` what was learned."""
    expect(decoder, settings, cost)
    budget.warm(min(decoder.context, settings.kv_warm_bytes // decoder.buffer_bytes_per_token))
    tokens = min(TOKENS, decoder.context)
    kv, entering = decoder.new_kv(tokens), decoder.new_entering(tokens)
    with torch.inference_mode():
        for count in (tokens, tokens, min(TURN_TOKENS, tokens), 1):
            began = time.monotonic()
            decoder.logits(decoder.forward([Run([0] * count, 0, kv, entering)])[-1:])
            seconds = time.monotonic() - began
        # The one token came last: it costs what any step costs, and the kernels for many are built by now.
        cost.observe_prefill(1, seconds)
        began = time.monotonic()
        decoder.forward([Run([0] * tokens, 0, kv, entering)])
        cost.observe_prefill(tokens, time.monotonic() - began)


def expect(decoder: Decoder, settings: EngineSettings, cost: CostModel) -> None:
    """Tells the cost model what computing costs going by the model's size."""
    config = decoder.config
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    weights = config.layers * config.hidden * (2 * query + 2 * key + 3 * config.intermediate)
    cost.expect_prefill(
        step=weights * decoder.dtype.itemsize / READ_RATE + 1e-4 * config.layers,
        token=2 * weights / MULTIPLY_RATE,
        attended=4 * query * config.layers / ATTEND_RATE,
        step_tokens=settings.prefill_chunk,
        lifted=1 - decoder.shared_layers / config.layers,
    )
