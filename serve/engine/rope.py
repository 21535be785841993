"""Rotary position embeddings as Hugging Face's Llama computes them: halves rotated, tables in fp32."""

from __future__ import annotations

import math

import torch

from serve.engine.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Returns fp32 [head_dim / 2], in radians per token."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(inverse, rope)
    return inverse


def _llama3(inverse: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1's scaling: slow frequencies divided by `factor`, fast ones kept, smooth in between."""
    wavelength = 2 * math.pi / inverse
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_context / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / rope.factor + smooth * inverse
    slow, fast = wavelength > rope.original_context / low, wavelength < rope.original_context / high
    return torch.where(slow, inverse / rope.factor, torch.where(fast, inverse, blended))


class RopeTable:
    """Cosines and signed sines for every position: two tensors [context, 1, head_dim] of the model's dtype."""

    def __init__(self, rope: RopeConfig, head_dim: int, context: int, dtype: torch.dtype) -> None:
        self.positions = context
        angles = torch.outer(torch.arange(context).float(), inverse_frequencies(rope, head_dim))
        sin = angles.sin()
        self._cos = torch.cat((angles, angles), dim=-1).cos().to(dtype).unsqueeze(1)
        self._signed_sin = torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and signed sines of `positions` (int64 [tokens]), each [tokens, 1, head_dim]."""
        return self._cos[positions], self._signed_sin[positions]


def rotate_(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Rotates `heads` [tokens, heads, head_dim] in place."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1).mul_(signed_sin)
    heads.mul_(cos).add_(swapped)
