"""Divergence is zero over equal KV, what the definition says over changed KV, and leaves the exact KV alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from memory.kv.codec.base import NOTHING_KEPT, Kept, KVArray
from memory.kv.codec.factory import codec_named
from serve.engine.divergence import CodedLayers, Variant, computed_by, divergence, divergences, through_codecs
from serve.engine.model import Decoder, Run
from serve.engine.weights import load_decoder
from tests.serve.tiny import build_model, prompt

PROMPTS = [prompt(90, 1), prompt(150, 2), prompt(40, 3)]
PREFIXES = [60, 120, 7]


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> Decoder:
    return load_decoder(tiny_model, torch.float32)


def nothing(token_ids: Sequence[int], kv: torch.Tensor) -> None:
    """A variant that is the exact KV."""


def zeroed(token_ids: Sequence[int], kv: torch.Tensor) -> None:
    kv.zero_()


def shaken(strength: float) -> Variant:
    def change(token_ids: Sequence[int], kv: torch.Tensor) -> None:
        kv.add_(torch.randn(kv.shape, generator=torch.Generator().manual_seed(1)), alpha=strength)

    return change


class Recorder:
    """A codec that changes nothing and notes what it was asked for."""

    name = "recorder"

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], Kept, int]] = []
        self.decoded_at: list[int] = []

    def encode(self, kv: KVArray, kept: Kept = NOTHING_KEPT, start: int = 0) -> bytes:
        self.asked.append((kv.shape, kept, start))
        return np.ascontiguousarray(kv).tobytes()

    def decode(self, payload: memoryview, out: KVArray, start: int = 0) -> None:
        self.decoded_at.append(start)
        out[...] = np.frombuffer(payload, out.dtype).reshape(out.shape)


def test_equal_kv_does_not_diverge(decoder: Decoder) -> None:
    found = divergences(decoder, {"same": nothing}, PROMPTS, PREFIXES, answer_tokens=4)
    same = found.variants["same"]
    assert (same.kl_mean, same.kl_p95, same.top1, same.answer_agreement) == (0.0, 0.0, 1.0, 1.0)
    assert same.tokens == sum(len(p) - n for p, n in zip(PROMPTS, PREFIXES, strict=True)) == 93
    assert found.noise is not None
    assert 0 <= found.noise < 1e-6


def test_the_divergence_is_that_of_the_definition(decoder: Decoder) -> None:
    """Against a computation by hand of one prompt whose prefix's KV is zero."""
    text, prefix = PROMPTS[0], PREFIXES[0]
    with torch.inference_mode():
        rows = []
        for zero in (False, True):
            kv = decoder.new_kv(len(text))
            decoder.forward([Run(text[:prefix], 0, kv)])
            if zero:
                kv[:, :, :, :prefix] = 0
            rows.append(decoder.logits(decoder.forward([Run(text[prefix:], prefix, kv)])).double().log_softmax(-1))
    exact, other = rows
    kl = (exact.exp() * (exact - other)).sum(-1)
    found = divergence(decoder, zeroed, [text], [prefix])
    assert found.kl_mean == pytest.approx(float(kl.mean()), rel=1e-4)
    assert found.kl_p95 == pytest.approx(float(np.quantile(kl.numpy(), 0.95)), rel=1e-4)
    assert found.top1 == pytest.approx(float((exact.argmax(-1) == other.argmax(-1)).double().mean()))
    assert found.answer_agreement is None


def test_stronger_changes_diverge_more(decoder: Decoder) -> None:
    variants = {str(strength): shaken(strength) for strength in (0.01, 0.1, 1.0)}
    found = divergences(decoder, variants, PROMPTS, PREFIXES, noise_prompts=0)
    means = [each.kl_mean for each in found.variants.values()]
    assert 0 < means[0] < means[1] < means[2]
    assert found.noise is None


def test_another_versions_kv_is_computed_by_that_version(tmp_path: Path, tiny_model: Path, decoder: Decoder) -> None:
    other = load_decoder(build_model(tmp_path / "other", "llama", seed=5), torch.float32)
    found = divergences(decoder, {"own": computed_by(decoder), "other": computed_by(other)}, PROMPTS, PREFIXES)
    assert found.variants["own"].kl_mean < 1e-6 < found.variants["other"].kl_mean


def test_answers_agree_up_to_the_first_difference(decoder: Decoder) -> None:
    found = divergences(decoder, {"zero": zeroed, "same": nothing}, PROMPTS, PREFIXES, answer_tokens=8)
    assert found.variants["same"].answer_agreement == 1.0
    agreement = found.variants["zero"].answer_agreement
    assert agreement is not None
    assert agreement < 1.0
    assert math.isclose(agreement * 8 * len(PROMPTS) % 1, 0, abs_tol=1e-9)


def test_codecs_see_chunks_with_the_ends_kept(decoder: Decoder) -> None:
    text = prompt(480, 4)
    lower, upper = Recorder(), Recorder()
    found = divergence(decoder, through_codecs([CodedLayers(lower, 0, 1), CodedLayers(upper, 1, 3)]), [text], [470])
    assert found.kl_mean == 0.0
    heads, dim = decoder.config.kv_heads, decoder.config.head_dim
    assert lower.asked == [
        ((1, 2, heads, 256, dim), Kept(4, 0), 0),
        ((1, 2, heads, 214, dim), Kept(0, 128), 256),
    ]
    assert [shape[0] for shape, _, _ in upper.asked] == [2, 2]
    assert upper.decoded_at == [0, 256]


def test_kept_tail_may_reach_over_chunks() -> None:
    codec = Recorder()
    kv = torch.zeros(1, 2, 1, 300, 4)
    through_codecs([CodedLayers(codec, 0, 1)], head=4, tail=128)(range(300), kv)
    assert [kept for _, kept, _ in codec.asked] == [Kept(4, 84), Kept(0, 44)]


def test_the_exact_codec_changes_nothing(decoder: Decoder) -> None:
    exact = codec_named("exact")
    found = divergence(decoder, through_codecs([CodedLayers(exact, 0, decoder.config.layers)]), PROMPTS, PREFIXES)
    assert found.kl_mean == 0.0


def test_it_runs_in_a_thread_of_its_own_without_gradients(decoder: Decoder) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(divergence, decoder, zeroed, PROMPTS, PREFIXES).result()
    assert found.kl_mean == divergence(decoder, zeroed, PROMPTS, PREFIXES).kl_mean > 0


@pytest.mark.parametrize(
    ("prompts", "prefixes", "answer", "message"),
    [
        ([], [], 0, "no prompts"),
        ([prompt(9)], [9], 0, "leaves nothing"),
        ([prompt(9)], [0], 0, "leaves nothing"),
        ([prompt(510)], [9], 8, "exceed"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    decoder: Decoder, prompts: list[tuple[int, ...]], prefixes: list[int], answer: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        divergences(decoder, {"same": nothing}, prompts, prefixes, answer_tokens=answer)
