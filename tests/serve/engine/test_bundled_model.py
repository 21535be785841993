"""The bundled model in bf16: the engine agrees with Hugging Face as far as bf16 allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from serve.engine.divergence import divergences
from serve.engine.model import Decoder, Run
from serve.engine.request import Request, Sampling
from serve.engine.settings import EngineSettings
from serve.engine.weights import load_decoder

pytestmark = pytest.mark.model

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours.",
)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[tuple[int, ...]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    turns = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    return [tuple(tokenizer.encode(turn).ids) for turn in turns]


@pytest.fixture(scope="module")
def decoder(model_dir: Path) -> Decoder:
    return load_decoder(model_dir, torch.bfloat16)


def test_distributions_agree_with_hugging_face(
    decoder: Decoder, reference: Any, prompts: list[tuple[int, ...]]
) -> None:
    """The divergence between the two is what bf16 itself costs: each is as far from the other as from fp32."""
    text = tuple(token for turn in prompts for token in turn) * 3
    with torch.inference_mode():
        ours = decoder.logits(decoder.forward([Run(text, 0, decoder.new_kv(len(text)))])).log_softmax(-1)
        theirs = reference(torch.tensor([text])).logits[0].float().log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    assert float(divergence.mean()) < 0.004
    assert float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()) > 0.95


def test_greedy_replies_follow_the_reference(model_dir: Path, reference: Any, prompts: list[tuple[int, ...]]) -> None:
    """Each token is the reference's likeliest, or so near to it that bf16 cannot tell them apart."""
    from serve.engine import load_engine

    engine = load_engine(EngineSettings(model=model_dir))
    try:
        sampling = Sampling(max_tokens=24, temperature=0)
        replies = [each.choices[0] for each in engine.generate([Request("base", p, sampling) for p in prompts])]
    finally:
        engine.close()
    assert replies[0].finish_reason == "stop"
    agreed = total = 0
    for question, reply in zip(prompts, replies, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([question + reply.token_ids])).logits[0].float()
        rows = logits[len(question) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(reply.token_ids).unsqueeze(1)).squeeze(1)
        best = rows.max(-1).values
        assert float((best - chosen).max()) < 0.5
        agreed += int((best == chosen).sum())
        total += len(reply.token_ids)
    assert agreed / total > 0.9


def test_the_noise_of_a_divergence_is_what_rounding_costs(decoder: Decoder, prompts: list[tuple[int, ...]]) -> None:
    """In bf16 the same KV computed in other pieces has other bits, so a noise of zero would measure nothing."""
    text = (tuple(token for turn in prompts for token in turn) * 20)[:640]
    found = divergences(decoder, {}, [text], [512])
    assert found.noise is not None
    assert 1e-6 < found.noise < 0.01
