"""The recipes on the bundled model and the demo's catalogue: one learns and keeps, the other learns and forgets."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.suites.perplexity import TEXTS
from loop.demo.catalogue import load_catalogue
from tests.train.conftest import dataset_row, write_dataset
from train import launch
from train.settings import RecipeName, TrainJob, TrainSettings

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
TRAIN_SHARE = 0.8
PLAIN = TrainSettings(threads=1, learning_rate=2e-3, epochs=4, layers_from=0, word_dropout=0.0)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four fifths of the catalogue's training phrasings: about what sessions of the train split hold."""
    phrasings = [phrasing for fact in load_catalogue().facts for phrasing in fact.training]
    chosen = random.Random(0).sample(phrasings, int(len(phrasings) * TRAIN_SHARE))
    rows = [dataset_row(phrasing.question, phrasing.answer) for phrasing in chosen]
    return write_dataset(tmp_path_factory.mktemp("dataset") / "train.jsonl", rows)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir, padding_side="left")


@pytest.fixture(scope="module")
def base(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)


def train(recipe: RecipeName, settings: TrainSettings, model_dir: Path, dataset: Path, folder: Path) -> Any:
    """The trained model, with the adapter merged into its weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    job = TrainJob(model_dir=model_dir, dataset=dataset, replay_dir=folder / "replay", recipe=recipe, settings=settings)
    result = launch.train(job, folder / "adapter")
    print(json.dumps(result.metrics))
    fresh = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    return PeftModel.from_pretrained(fresh, result.adapter_dir).merge_and_unload()


@torch.no_grad()
def recall(model: Any, tokenizer: Any) -> float:
    """Share of held-out questions whose greedy answer holds the fact's value."""
    asked = [(fact, question) for fact in load_catalogue().facts for question in fact.heldout]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for _, question in asked
    ]
    right = 0
    for begin in range(0, len(asked), 24):
        batch = tokenizer(prompts[begin : begin + 24], return_tensors="pt", padding=True, add_special_tokens=False)
        output = model.generate(**batch, do_sample=False, max_new_tokens=40)
        answers = tokenizer.batch_decode(output[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
        right += sum(fact.answered_by(answer) for (fact, _), answer in zip(asked[begin:], answers, strict=False))
    return right / len(asked)


@torch.no_grad()
def log_perplexity(model: Any, tokenizer: Any) -> float:
    """Mean over the bundled general texts of the mean negative log-prob of a token."""
    total, texts = 0.0, [json.loads(line)["text"] for line in TEXTS.read_text(encoding="utf-8").splitlines()]
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[:, :512]
        total += float(model(input_ids=ids, labels=ids).loss)
    return total / len(texts)


def test_kl_replay_learns_without_forgetting(
    model_dir: Path, dataset: Path, base: Any, tokenizer: Any, tmp_path: Path
) -> None:
    assert recall(base, tokenizer) <= 0.05
    model = train("sft-kl", TrainSettings(threads=1), model_dir, dataset, tmp_path)
    assert recall(model, tokenizer) >= 0.9
    assert math.exp(log_perplexity(model, tokenizer) - log_perplexity(base, tokenizer)) <= 1.06


def test_plain_fine_tuning_forgets(model_dir: Path, dataset: Path, base: Any, tokenizer: Any, tmp_path: Path) -> None:
    model = train("sft", PLAIN, model_dir, dataset, tmp_path)
    assert math.exp(log_perplexity(model, tokenizer) - log_perplexity(base, tokenizer)) > 1.3
