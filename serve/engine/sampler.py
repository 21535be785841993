"""Draws next tokens and reports log-probabilities.

A reply depends on its own logits and its own generator only, never on what else runs beside it. Log-probabilities
are the model's own: before temperature, top-p and masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serve.engine.request import Sampling, TokenLogprob

LIKELY_TOKENS = 256  # a nucleus rarely holds more; sorting the whole vocabulary costs milliseconds


def new_generator(seed: int | None, choice: int) -> torch.Generator:
    """A generator of its own for each choice; the same `seed` and `choice` draw the same reply."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed((seed + choice) % 2**63)
    return generator


def sample(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator, banned: Sequence[int]) -> int:
    """Returns the next token for fp32 `logits` [vocabulary]; `banned` tokens are never drawn."""
    if banned:
        logits = logits.clone()
        logits[list(banned)] = float("-inf")
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits / max(sampling.temperature, 1e-4)
    if sampling.top_p < 1:
        weights, tokens = _nucleus(torch.softmax(scaled, -1), sampling.top_p)
        return int(tokens[_draw(weights, generator)])
    return _draw(torch.softmax(scaled, -1), generator)


def _nucleus(probabilities: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest likeliest tokens that hold `top_p` together: their probabilities and ids, likeliest first."""
    likely, tokens = probabilities.topk(min(LIKELY_TOKENS, len(probabilities)))
    if likely.sum() < top_p:
        likely, tokens = probabilities.sort(descending=True)
    before = likely.cumsum(0) - likely
    size = max(1, int((before < top_p).sum()))
    return likely[:size], tokens[:size]


def _draw(weights: torch.Tensor, generator: torch.Generator) -> int:
    """Draws an index by inverting the cumulative sum: one random number a token."""
    cumulative = weights.double().cumsum(0)
    point = torch.rand((), dtype=torch.float64, generator=generator) * cumulative[-1]
    return min(int(torch.searchsorted(cumulative, point, right=True)), len(weights) - 1)


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of `token_ids` (one a row) under fp32 `logits` [rows, vocabulary]."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids).unsqueeze(1))
    ranks = ((logprobs > chosen).sum(-1) + 1).tolist()
    values = chosen.squeeze(1).tolist()
    if top == 0:
        return [TokenLogprob(*row) for row in zip(token_ids, values, ranks, strict=True)]
    best, best_ids = logprobs.topk(top, dim=-1)
    tops = [tuple(zip(ids, found, strict=True)) for ids, found in zip(best_ids.tolist(), best.tolist(), strict=True)]
    return [TokenLogprob(*row) for row in zip(token_ids, values, ranks, tops, strict=True)]
