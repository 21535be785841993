"""How far the next-token distributions move when a prefix's KV is replaced: by a codec's, or by another version's.

The exact KV of each prefix is computed once; each variant gets a copy, changes it, and the tokens that follow run over
both. The divergence is KL(exact || variant) in nats at each following token. `noise` is the same figure for exact KV
that was computed in other pieces: what rounding alone does, so nothing below it means anything.

Nothing here touches an engine's state: it runs in any thread, holds two KV buffers of one prompt at a time and logits
of `ROWS` tokens, whatever the prompts' number and length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from memory.kv.codec.base import Codec, Kept
from serve.engine.bands import as_array
from serve.engine.model import Decoder, Run

ROWS = 64
"""Tokens whose logits are held at a time: with a vocabulary of 150,000 they take some 40 MB."""
PIECE_TOKENS = 512
NOISE_PIECE_TOKENS = 301
"""Another cut, and an odd one: pieces that are multiples of 32 tokens give the same bits whatever their number."""
CHUNK_TOKENS = 256
HEAD_TOKENS, TAIL_TOKENS = 4, 128
"""What stays exact of a session in lossy chunks: attention's sink and the tokens that are attended to most."""

Variant = Callable[[Sequence[int], torch.Tensor], None]
"""Gets a prefix's ids and its exact KV [layers, 2, kv_heads, tokens, head_dim], and changes that in place."""


@dataclass(frozen=True)
class Divergence:
    """Over `tokens` next-token distributions; KL in nats, shares between 0 and 1.

    `answer_agreement`: of the greedy answers after the prompts, the share that is equal before the first difference;
    None where no answers were asked for.
    """

    kl_mean: float
    kl_p95: float
    top1: float
    answer_agreement: float | None
    tokens: int


@dataclass(frozen=True)
class Divergences:
    """Each variant's divergence, and the noise: mean KL between two exact computations, None where not asked for."""

    variants: dict[str, Divergence]
    noise: float | None


@dataclass(frozen=True)
class CodedLayers:
    """Layers [first, last) and the codec that their KV goes through."""

    codec: Codec
    first: int
    last: int


def through_codecs(bands: Sequence[CodedLayers], head: int = HEAD_TOKENS, tail: int = TAIL_TOKENS) -> Variant:
    """The variant that KV memory hands back: encoded and decoded chunk by chunk; other layers stay exact.

    The first `head` and the last `tail` tokens of the prefix are given to the codec as `Kept`.
    """

    def replace(token_ids: Sequence[int], kv: torch.Tensor) -> None:
        tokens = len(token_ids)
        for band in bands:
            array = as_array(kv[band.first : band.last])
            for start in range(0, tokens, CHUNK_TOKENS):
                last = min(start + CHUNK_TOKENS, tokens)
                kept = Kept(max(0, min(head, last) - start), max(0, last - max(start, tokens - tail)))
                payload = band.codec.encode(array[:, :, :, start:last], kept, start)
                band.codec.decode(memoryview(payload), array[:, :, :, start:last], start)

    return replace


def computed_by(decoder: Decoder) -> Variant:
    """The variant that another version computed: what serving stale KV would use."""

    def replace(token_ids: Sequence[int], kv: torch.Tensor) -> None:
        buffer = decoder.new_kv(len(token_ids))
        prefill(decoder, token_ids, 0, buffer)
        kv.copy_(buffer)

    return replace


@torch.inference_mode()
def divergence(
    decoder: Decoder, variant: Variant, prompts: Sequence[Sequence[int]], prefixes: Sequence[int]
) -> Divergence:
    """One variant's divergence, without answers. See `divergences`."""
    return divergences(decoder, {"variant": variant}, prompts, prefixes, noise_prompts=0).variants["variant"]


@torch.inference_mode()
def divergences(
    decoder: Decoder,
    variants: Mapping[str, Variant],
    prompts: Sequence[Sequence[int]],
    prefixes: Sequence[int],
    *,
    answer_tokens: int = 0,
    noise_prompts: int | None = None,
) -> Divergences:
    """Compares every variant of the KV of `prompts[i][:prefixes[i]]` over the tokens that follow it.

    Of the first `noise_prompts` prompts (all by default) the noise is measured too, which costs a prefill each.
    Raises `ValueError` where a prefix does not leave a token to compare, or a prompt and its answer do not fit.
    """
    _check(decoder, prompts, prefixes, answer_tokens)
    with_noise = len(prompts) if noise_prompts is None else noise_prompts
    measured = {name: _Measured() for name in variants}
    noise = _Measured()
    for place, (prompt, prefix) in enumerate(zip(prompts, prefixes, strict=True)):
        case = _Case.of(decoder, prompt, prefix, answer_tokens)
        for name, variant in variants.items():
            case.compare(variant, measured[name])
        if place < with_noise:
            case.compare(_recomputed(decoder), noise)
    summaries = {name: found.summary(answer_tokens * len(prompts)) for name, found in measured.items()}
    return Divergences(summaries, noise.summary(0).kl_mean if with_noise else None)


def _check(decoder: Decoder, prompts: Sequence[Sequence[int]], prefixes: Sequence[int], answer_tokens: int) -> None:
    if not prompts:
        raise ValueError("no prompts to compare: give at least one")
    for prompt, prefix in zip(prompts, prefixes, strict=True):
        if not 0 < prefix < len(prompt):
            raise ValueError(f"a prefix of {prefix} tokens leaves nothing to compare in a prompt of {len(prompt)}")
        if len(prompt) + answer_tokens > decoder.context:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {answer_tokens} of an answer exceed the {decoder.context} "
                "that the model reads: give shorter ones"
            )


def _recomputed(decoder: Decoder) -> Variant:
    def replace(token_ids: Sequence[int], kv: torch.Tensor) -> None:
        # A prefix that fits one piece is cut as well, else it would be computed the same way twice.
        prefill(decoder, token_ids, 0, kv, min(NOISE_PIECE_TOKENS, len(token_ids) * 5 // 8 | 1))

    return replace


@dataclass
class _Measured:
    """What was found of one variant so far."""

    kl: list[float] = field(default_factory=list)
    same: int = 0
    agreed: int = 0

    def summary(self, answer_tokens: int) -> Divergence:
        kl = np.array(self.kl or [0.0])
        return Divergence(
            kl_mean=float(kl.mean()),
            kl_p95=float(np.quantile(kl, 0.95)),
            top1=self.same / max(1, len(self.kl)),
            answer_agreement=self.agreed / answer_tokens if answer_tokens else None,
            tokens=len(self.kl),
        )


@dataclass(frozen=True)
class _Case:
    """One prompt with its exact KV, the hidden states after its prefix and the greedy answer."""

    decoder: Decoder
    prompt: Sequence[int]
    prefix: int
    kv: torch.Tensor
    hidden: torch.Tensor
    answer: list[int]
    answer_tokens: int

    @classmethod
    def of(cls, decoder: Decoder, prompt: Sequence[int], prefix: int, answer_tokens: int) -> _Case:
        kv = decoder.new_kv(len(prompt) + answer_tokens)
        prefill(decoder, prompt[:prefix], 0, kv)
        hidden = prefill(decoder, prompt[prefix:], prefix, kv)
        answer = _greedy(decoder, hidden[-1:], len(prompt), kv, answer_tokens)
        return cls(decoder, prompt, prefix, kv, hidden, answer, answer_tokens)

    def compare(self, variant: Variant, found: _Measured) -> None:
        kv = torch.empty_like(self.kv)
        changed = kv[:, :, :, : self.prefix]
        changed.copy_(self.kv[:, :, :, : self.prefix])
        variant(self.prompt[: self.prefix], changed)
        hidden = prefill(self.decoder, self.prompt[self.prefix :], self.prefix, kv)
        for kl, same in _compare(self.decoder, self.hidden, hidden):
            found.kl.extend(kl)
            found.same += same
        answer = _greedy(self.decoder, hidden[-1:], len(self.prompt), kv, self.answer_tokens)
        found.agreed += _common(self.answer, answer)


def prefill(
    decoder: Decoder, token_ids: Sequence[int], start: int, kv: torch.Tensor, piece: int = PIECE_TOKENS
) -> torch.Tensor:
    """Computes tokens at positions start, start+1, ... piece by piece; returns their hidden states."""
    cuts = range(0, len(token_ids), piece)
    return torch.cat([decoder.forward([Run(token_ids[cut : cut + piece], start + cut, kv)]) for cut in cuts])


def _compare(decoder: Decoder, exact: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[list[float], int]]:
    """KL of each row, and how many rows have the same likeliest token, block by block."""
    for first in range(0, len(exact), ROWS):
        expected = decoder.logits(exact[first : first + ROWS]).log_softmax(-1)
        found = decoder.logits(other[first : first + ROWS]).log_softmax(-1)
        same = int((expected.argmax(-1) == found.argmax(-1)).sum())
        kl: list[float] = (expected.exp() * expected.sub_(found)).sum(-1).clamp_(min=0.0).tolist()
        yield kl, same


def _greedy(decoder: Decoder, hidden: torch.Tensor, start: int, kv: torch.Tensor, count: int) -> list[int]:
    """The likeliest continuation of `count` tokens, from the hidden state of the token before position `start`."""
    answer: list[int] = []
    for position in range(start, start + count):
        answer.append(int(decoder.logits(hidden).argmax()))
        if len(answer) < count:
            hidden = decoder.forward([Run(answer[-1:], position, kv)])
    return answer


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    for place, (left, right) in enumerate(zip(first, second, strict=True)):
        if left != right:
            return place
    return len(first)
