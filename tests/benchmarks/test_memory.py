"""The benchmarks of KV memory run, and say all that they should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory import resume
from benchmarks.memory.__main__ import WANTED, run, table, verdict
from benchmarks.memory.resume import Engine

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "exact_ratio", "int8_ratio", "int8_kl", "int4_ratio", "int4_kl", "low_ratio", "low_kl",
    "resume_over_best_peer_exact", "resume_over_best_peer_int4", "peers", "decode_gb_s", "disk_share", "lookup_p99_us",
    "flips_tried", "flips_accepted", "syscalls_failed", "wrong_answers",
]  # fmt: skip


def quick(model_dir: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "--quick", *arguments],
        cwd=ROOT,
        env=os.environ | {"KVLOOP_TEST_MODEL": str(model_dir)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(NAMES) <= set(figures)
    assert figures["failed"] == {}
    return figures


def test_a_smoke_run_of_store_and_faults(model_dir: Path) -> None:
    figures = quick(model_dir, "--only", "store,faults")
    assert figures["flips_tried"] > 1000
    assert (figures["flips_accepted"], figures["wrong_answers"], figures["unhandled"]) == (0, 0, 0)
    assert figures["syscalls_failed"] is None or figures["syscalls_failed"] > 50
    assert figures["disk_share"] > 0
    assert figures["exact_ratio"] is None


@pytest.mark.slow
def test_a_smoke_run_of_everything(model_dir: Path) -> None:
    figures = quick(model_dir)
    assert figures["peers"]["Hugging Face torch.load"] > 0
    assert figures["resume_over_best_peer_exact"] > 0
    assert figures["resume_restored"]["kvloop int4"] >= resume.QUICK_TOKENS - 16


def test_a_benchmark_that_fails_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    monkeypatch.setattr("benchmarks.memory.codecs.measure", lambda: {"decode_gb_s": {"exact": 0.25, "int4": 2.0}})
    monkeypatch.setattr("benchmarks.memory.lookups.measure", lambda: 1 / 0)
    figures = run(["codecs", "lookups"], quick=False, with_vllm=False, console=Console())
    assert figures["decode_gb_s"]["int4"] == 2.0
    assert figures["lookup_p99_us"] is None
    assert list(figures["failed"]) == ["lookups"]
    assert verdict("decode_gb_s exact", 0.25) == "NO"
    assert verdict("decode_gb_s int4", 2.0) == "yes"
    assert verdict("lookup_p99_us", None) == "not measured"
    shown = [cell for column in table(figures).columns for cell in column.cells]
    assert {name for name in WANTED if name.startswith("decode_gb_s ")} & set(shown)


def test_the_fastest_peer_is_what_counts_and_missing_ones_are_told() -> None:
    def row(name: str, script: str, *times: float, failed: str = "") -> Engine:
        return Engine(name, script, Path("python"), {}, times=list(times), failed=failed)

    rows = [
        row("kvloop exact", "peer_kvloop.py", 90, 100, 400),
        row("kvloop int4", "peer_kvloop.py", failed="resume: only 0 tokens were restored"),
        row("slow", "peer_llama.py", 300),
        row("fast", "peer_huggingface.py", 200, 250, 1000),
        row("absent", "peer_vllm.py", failed="pip failed"),
    ]
    figures = resume.figures(rows)
    assert figures["resume_over_best_peer_exact"] == 100 / 250
    assert figures["resume_over_best_peer_int4"] is None
    assert figures["peers"] == {"slow": 300, "fast": 250, "absent": None}
    assert figures["peers_missing"]["absent"] == "pip failed"
