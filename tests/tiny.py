"""Tiny random models for tests where weights do not matter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def make_tiny_model(
    folder: Path, tokenizer_from: Path, context_length: int = 2048, seed: int = 0, **sizes: Any
) -> Path:
    """Writes a random two-layer Llama of about 3 million parameters with the tokenizer of another model.

    `sizes` are fields of its configuration that shall be others.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": 49152,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": context_length,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }
    config = LlamaConfig(**(fields | sizes))
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer_from / name).exists():
            shutil.copy(tokenizer_from / name, folder / name)
    return folder
