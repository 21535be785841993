"""Tiny random models and adapters in Hugging Face's formats, small enough to build in milliseconds."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 97
EOS = 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
}


def build_model(folder: Path, variant: str = "llama", seed: int = 0) -> Path:
    """Saves the random fp32 model `variant` in `folder`. Norms and biases are random too, so that they matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, extra = VARIANTS[variant]
    sizes = dict(SIZES) if family != "qwen2" else {key: value for key, value in SIZES.items() if key != "head_dim"}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **extra), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def build_thin_model(folder: Path, context: int, seed: int = 0) -> Path:
    """Saves a random fp32 model of two layers with one head each: long prompts cost it as little as can be."""
    from transformers import LlamaConfig, LlamaForCausalLM

    thin = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": context}
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(SIZES | thin | heads))).save_pretrained(folder)
    return folder


def load_reference(folder: Path) -> Any:
    """The same model in Hugging Face's own code."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """fp32 [tokens, vocabulary] of Hugging Face's forward."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0].float()
    return logits


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids that end nothing."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCABULARY, (length,), generator=generator).tolist())


def build_adapter(folder: Path, base: Path, seed: int = 0, **settings: Any) -> Path:
    """Saves a random LoRA adapter for the model in `base`, made by PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
        model = get_peft_model(load_reference(base), LoraConfig(task_type="CAUSAL_LM", **(options | settings)))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def merged_reference(adapter: Path, base: Path) -> Any:
    """The base with the adapter merged by PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import PeftModel

        return PeftModel.from_pretrained(load_reference(base), adapter).merge_and_unload().eval()
