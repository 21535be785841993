"""The whole loop on the bundled model, through the command a newcomer runs first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port


def run_demo(tmp_path: Path, model_dir: Path, *options: str, settings: tuple[str, ...] = ()) -> dict[str, Any]:
    result = tmp_path / "demo.json"
    overrides = [
        f"model={json.dumps(str(model_dir))}",
        f"gateway.port={free_port()}",
        f"worker.port={free_port()}",
        *settings,
    ]
    command = [sys.executable, "-m", "loop.cli", "--home", str(tmp_path / "home")]
    command += [part for override in overrides for part in ("--set", override)]
    done = subprocess.run([*command, "demo", "--exit", "--json", str(result), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.mark.model
@pytest.mark.timeout(1500)
def test_the_loop_closes(tmp_path: Path, model_dir: Path) -> None:
    # few products, so more of the sessions must be held out for the gate to have its 8 of them: with this share of 32
    # sessions that happens in 99 of 100 runs
    # one compute thread: two collapse beside the tests of the other core
    settings = ("journal.eval_share=0.45", "train.threads=1")
    measured = run_demo(tmp_path, model_dir, "--facts", "8", settings=settings)
    assert measured["recall_before"] <= 0.05
    assert measured["recall_after"] >= 0.5
    assert measured["gate_verdict"] == "pass"
    assert measured["perplexity_ratio"] <= 1.06
    assert measured["cached_tokens_honest"] is True
    assert measured["ttft_restored_over_cold"] <= 0.15
    assert measured["swap_requests"] >= 200
    assert (measured["swap_failed"], measured["swap_mixed"]) == (0, 0)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_reaches_its_aims(tmp_path: Path, model_dir: Path) -> None:
    measured = run_demo(tmp_path, model_dir, "--plain-sft")
    assert measured["recall_before"] <= 0.05
    assert measured["recall_after"] >= 0.90
    assert measured["gate_verdict"] == "pass"
    assert measured["gate_refused_plain_sft"] is True
    assert measured["perplexity_ratio"] <= 1.06
    assert measured["decode_over_hf"] >= 1.0
    assert measured["prefill_over_hf"] >= 1.0
