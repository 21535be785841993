"""An evaluation through the real worker: its own, of a random model, with an adapter that does something."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from evals import report
from evals.gate import judge
from evals.run import EvalJob, EvalModel, evaluate
from evals.settings import EvalSettings, GateSettings
from tests.evals.fakes import write_heldout

pytestmark = pytest.mark.model


def make_adapter(folder: Path, hidden: int = 64, rank: int = 4) -> Path:
    """A random PEFT adapter of `tests.tiny`'s model, on the output projection of both layers."""
    folder.mkdir()
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(2):
        stem = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{stem}.lora_A.weight"] = random.normal(0, 1, (rank, hidden)).astype(np.float32)
        tensors[f"{stem}.lora_B.weight"] = random.normal(0, 1, (hidden, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": ["o_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_a_whole_evaluation_with_its_own_worker(tiny_model_dir: Path, tmp_path: Path) -> None:
    job = EvalJob(
        model_dir=tiny_model_dir,
        heldout=write_heldout(tmp_path / "heldout.jsonl", 10),
        candidate=EvalModel(name="v2", adapter=make_adapter(tmp_path / "adapter")),
        reuse_max_kl=1.0,
        settings=EvalSettings(knowledge_questions=10, stale_probes=3),
    )
    result = evaluate(job)
    base, candidate = result.models
    assert base.weights_id is not None
    assert candidate.weights_id is not None
    assert candidate.weights_id.startswith(f"{base.weights_id}+")
    # A random model spreads its probability over 49,152 tokens, and no adapter of this size leaves that as it was.
    assert base.suite("perplexity").mean == pytest.approx(-np.log(49152), abs=1.0)
    assert abs(result.perplexity_ratio("v2") - 1.0) > 1e-4
    assert candidate.generated_tokens > 0
    stale = result.stale_kv
    assert stale is not None
    assert [(group.kind, group.probes) for group in stale.groups] == [("conversations", 3), ("texts", 3)]
    # The random adapter moves every layer's output, so KV of the base is no longer what it would compute itself.
    assert all(group.noise_kl < group.kl < group.kl_p95 for group in stale.groups)
    assert stale.kl == max(group.kl for group in stale.groups)
    assert stale.allowed == (stale.kl < 1.0)
    decision = judge(result, GateSettings())
    assert decision.verdict != "pass"
    report.write(result, decision, tmp_path / "report")
