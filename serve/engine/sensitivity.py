"""How much a version's next-token distributions react to its KV: the Fisher information, from gradients.

For tokens drawn from the version's own distributions after a text, the gradient of their log-probabilities about each
cached key and value is one sample g of E[g g^T]: an error d of the KV moves the distributions by d^T E[g g^T] d / 2
nats. Keys are taken without their rotation, as the compact codec sees them.

Computed apart from `Decoder.forward`, which writes in place and through prepacked weights. Holds the graph of the
tokens after the prefix and, while it runs, a second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from memory.kv.codec.compact_rotation import cos_sin, rotate
from serve.engine.linear import Linear
from serve.engine.model import Decoder, Layer

DRAWS = 2
"""Continuations drawn for each text; each costs a backward pass."""


def fisher(
    decoder: Decoder,
    prompt: Sequence[int],
    kv: torch.Tensor,
    turns: NDArray[np.uint64],
    layers: range,
    skip: tuple[int, int],
    seed: int = 0,
) -> NDArray[np.float64]:
    """Information of the tokens after a prefix about each layer's keys and values [layers, 2, width, width].

    `kv` [layers, 2, kv_heads, prefix, head_dim] is that of the first tokens of `prompt`; of these, the first and the
    last `skip` are left out. It is what one following token says, summed over the prefix's positions.
    """
    prefix, (first, last) = kv.shape[3], skip
    with torch.inference_mode(False), torch.enable_grad():
        leaf = kv.detach().clone().requires_grad_(True)
        log_probabilities = _logits(decoder, prompt[prefix:], prefix, leaf).log_softmax(-1)
        generator = torch.Generator().manual_seed(seed)
        total = np.zeros(())
        for draw in range(DRAWS):
            drawn = torch.multinomial(log_probabilities.detach().exp(), 1, generator=generator)
            score = log_probabilities.gather(1, drawn).sum()
            (gradient,) = torch.autograd.grad(score, leaf, retain_graph=draw + 1 < DRAWS)
            total = total + _outer(gradient[layers.start : layers.stop].float().numpy(), turns, first, prefix - last)
    summed: NDArray[np.float64] = total / (DRAWS * (len(prompt) - prefix))
    return summed


def _outer(gradient: NDArray[np.float32], turns: NDArray[np.uint64], first: int, last: int) -> NDArray[np.float64]:
    """Sum of g g^T over positions first ... last - 1, for each layer's keys and values."""
    layers, parts, heads, _, dim = gradient.shape
    cos, sin = cos_sin(turns, first, last - first)
    information = np.empty((layers, parts, heads * dim, heads * dim))
    for layer in range(layers):
        for part in range(parts):
            numbers = gradient[layer, part, :, first:last]
            if part == 0:
                numbers = rotate(numbers, cos, -sin)
            flat = numbers.transpose(1, 0, 2).reshape(last - first, heads * dim).astype(np.float64)
            information[layer, part] = flat.T @ flat
    return information


def _logits(decoder: Decoder, token_ids: Sequence[int], start: int, kv: torch.Tensor) -> torch.Tensor:
    """fp32 logits of tokens at positions start, start + 1, ... after `kv`, which gradients flow to."""
    config = decoder.config
    hidden = F.embedding(torch.tensor(list(token_ids)), decoder.embedding)
    cos, sin = (each.clone() for each in decoder.rope.at(torch.arange(start, start + len(token_ids))))
    for index, layer in enumerate(decoder.layers):
        normed = F.rms_norm(hidden, (config.hidden,), layer.attention_norm, config.norm_eps)
        mask = _mask(start, len(token_ids), config.windows[index], hidden.dtype)
        hidden = hidden + _plain(layer.output, _attend(decoder, layer, normed, kv[index], cos, sin, mask))
        normed = F.rms_norm(hidden, (config.hidden,), layer.mlp_norm, config.norm_eps)
        gate, up = _plain(layer.gate_up, normed).chunk(2, dim=-1)
        hidden = hidden + _plain(layer.down, F.silu(gate) * up)
    return _plain(decoder.head, F.rms_norm(hidden, (config.hidden,), decoder.final_norm, config.norm_eps)).float()


def _attend(
    decoder: Decoder,
    layer: Layer,
    normed: torch.Tensor,
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    config = decoder.config
    heads = _plain(layer.qkv, normed).view(len(normed), -1, config.head_dim)
    query, key, value = heads.split([config.heads, config.kv_heads, config.kv_heads], dim=1)  # type: ignore[no-untyped-call]
    if layer.query_norm is not None and layer.key_norm is not None:
        query = F.rms_norm(query, (config.head_dim,), layer.query_norm, config.norm_eps)
        key = F.rms_norm(key, (config.head_dim,), layer.key_norm, config.norm_eps)
    query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
    keys, values = torch.cat((kv[0], key.transpose(0, 1)), dim=1), torch.cat((kv[1], value.transpose(0, 1)), dim=1)
    shared = config.heads // config.kv_heads
    mixed = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.repeat_interleave(shared, 0).unsqueeze(0),
        values.repeat_interleave(shared, 0).unsqueeze(0),
        attn_mask=mask,
    )
    return mixed[0].transpose(0, 1).reshape(len(normed), -1)


def _plain(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, linear.dense(), linear.bias)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    half = heads.shape[-1] // 2
    return heads * cos + torch.cat((heads[..., half:], heads[..., :half]), dim=-1) * signed_sin


def _mask(start: int, count: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    queries = torch.arange(start, start + count).unsqueeze(1)
    keys = torch.arange(start + count).unsqueeze(0)
    unseen = keys > queries
    if window is not None:
        unseen |= keys <= queries - window
    return torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, float("-inf"))
