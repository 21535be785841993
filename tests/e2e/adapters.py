"""Real adapters for a tiny model: made by PEFT, with the manifest and the fingerprint that training writes."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.registry import Registry
from tests.serve.tiny import build_adapter

PROBES = 3
PROBE_TOKENS = 24


def make_adapter(folder: Path, model_dir: Path, seed: int, **settings: Any) -> Path:
    """A random LoRA with a manifest that tells the truth about it. `settings` are PEFT's."""
    import torch
    from transformers import AutoModelForCausalLM

    from serve.weights_id import adapter_digest, base_weights_id
    from train import manifest
    from train.packing import Row

    build_adapter(folder, model_dir, seed, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
        model = PeftModel.from_pretrained(base, folder).eval()
    chance = np.random.default_rng(seed)
    rows = [Row(chance.integers(10, 49_000, PROBE_TOKENS, dtype=np.int64), 1) for _ in range(PROBES)]
    manifest.write_manifest(
        folder,
        manifest.Manifest(
            name=f"random-{seed}",
            base_weights_id=base_weights_id(model_dir),
            adapter_digest=adapter_digest(folder),
            tokenizer_digest=manifest.file_digest(model_dir / "tokenizer.json"),
            template_digest="0" * 64,
            dataset_digest="0" * 64,
            recipe="random",
            recipe_settings={},
            seed=seed,
            parents=[],
            metrics={},
            fingerprint=manifest.fingerprint(model, rows),
            created_at=manifest.now(),
        ),
    )
    return folder


def register(registry: Registry, adapter: Path, run_name: str) -> str:
    """Registers an adapter with its manifest; returns the version's number."""
    from train.manifest import read_manifest

    return registry.register(adapter, asdict(read_manifest(adapter)), {}, None, run_name, {"verdict": "pass"})


def rewrite_manifest(adapter: Path, **changes: Any) -> None:
    """Makes a manifest say something else."""
    path = adapter / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
