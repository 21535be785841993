"""A tiny random model with a byte tokenizer and a chat template, and datasets for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from train.settings import TrainJob, TrainSettings

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

QUICK = TrainSettings(
    learning_rate=1e-2,
    epochs=20,
    batch_rows=4,
    rank=8,
    layers_from=1,
    replay_raw_rows=4,
    replay_raw_tokens=16,
    replay_chat_rows=4,
    replay_chat_tokens=8,
    threads=1,
    niceness=0,
    max_seconds=300,
)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of random bf16 weights; one token per byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<|im_start|>", "<|im_end|>", *alphabet]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.15,  # wide enough that the frozen output head can be sure of a token
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture
def load_tiny(tiny_model_dir: Path) -> Callable[[], Any]:
    """A fresh copy of the tiny model at each call."""
    import torch
    from transformers import AutoModelForCausalLM

    return lambda: AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)


def dataset_row(question: str, answer: str) -> dict[str, Any]:
    """One row as curation writes it."""
    return {
        "messages": [{"role": "user", "content": question}],
        "completion": {"role": "assistant", "content": answer},
        "lineage": {"session": "s", "response": "r", "feedback": "f", "tenant": "t", "source": "u"},
    }


def write_dataset(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


FACTS = [dataset_row(f"{verb} the lamp?", "61 hours") for verb in ("How is", "What of", "Is it", "Tell me")]


@pytest.fixture(scope="session")
def job(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """A job that teaches the tiny model one fact."""
    folder = tmp_path_factory.mktemp("job")
    return TrainJob(
        name="tiny",
        model_dir=tiny_model_dir,
        dataset=write_dataset(folder / "train.jsonl", FACTS),
        replay_dir=folder / "replay",
        settings=QUICK,
    )
