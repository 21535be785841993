"""The trainer as a process: what it leaves, and what happens when it or its parent dies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from serve.weights_id import adapter_digest, base_weights_id
from tests.train.conftest import QUICK, write_dataset
from train import events, launch
from train.events import Failed, Progress
from train.launch import TrainFailed, TrainResult
from train.manifest import BadManifest, read_manifest, token_logprobs
from train.packing import Row
from train.settings import TrainJob


def trainer_process(folder: Path) -> psutil.Process:
    """The trainer working on `folder`."""
    (found,) = [
        process for process in psutil.process_iter(["cmdline"]) if str(folder) in (process.info["cmdline"] or ())
    ]
    return found


def started_trainer(folder: Path) -> psutil.Process:
    """Waits for the log's first line, which comes after the trainer tied itself to its parent and to its signals."""
    log = folder / launch.LOG
    while not log.exists() or not log.stat().st_size:
        time.sleep(0.05)
    return trainer_process(folder)


@pytest.fixture(scope="module")
def attempts(
    job: TrainJob, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[psutil.Process], TrainResult, list[Progress]]:
    """An attempt whose caller was interrupted after the first step, then one that ends well in the same place."""
    out_dir = tmp_path_factory.mktemp("out") / "adapter"
    partial = out_dir.with_name("adapter.partial")
    trainers: list[psutil.Process] = []

    def interrupt(progress: Progress) -> None:
        trainers.append(trainer_process(partial))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch.train(job, out_dir, interrupt)
    assert not out_dir.exists()
    assert partial.is_dir()
    seen: list[Progress] = []
    result = launch.train(job, out_dir, seen.append)
    assert not partial.exists()
    return trainers, result, seen


@pytest.fixture(scope="module")
def result(attempts: tuple[list[psutil.Process], TrainResult, list[Progress]]) -> TrainResult:
    return attempts[1]


def test_a_caller_that_raises_leaves_no_trainer(
    attempts: tuple[list[psutil.Process], TrainResult, list[Progress]],
) -> None:
    (trainer,) = attempts[0]
    assert not trainer.is_running()


def test_progress_reports_each_step_and_the_loss_falls(
    attempts: tuple[list[psutil.Process], TrainResult, list[Progress]],
) -> None:
    seen = attempts[2]
    assert [progress.step for progress in seen] == list(range(1, 21))
    assert {progress.steps for progress in seen} == {20}
    assert seen[-1].loss < seen[0].loss
    assert all(progress.kl is not None for progress in seen)


def test_adapter_is_safetensors_only(result: TrainResult) -> None:
    names = {path.name for path in result.adapter_dir.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "manifest.json", "metrics.json", "train.log"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    tensors = load_file(result.adapter_dir / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2  # two layers, seven projections, A and B
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_manifest_says_what_the_adapter_was_made_from(result: TrainResult, job: TrainJob) -> None:
    manifest = read_manifest(result.adapter_dir)
    assert manifest.adapter_digest == adapter_digest(result.adapter_dir)
    assert manifest.base_weights_id == base_weights_id(job.model_dir)
    assert manifest.recipe == "sft-kl"
    assert manifest.recipe_settings["rank"] == QUICK.rank
    assert manifest.metrics == result.metrics
    assert manifest.metrics["steps"] == 20
    assert manifest.metrics["rows"] == 4
    assert result.manifest["fingerprint"]["tolerance"] == manifest.fingerprint.tolerance


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_fingerprint_is_what_a_server_of_the_merged_weights_finds(
    result: TrainResult, load_tiny: Callable[[], Any]
) -> None:
    tensors = load_file(result.adapter_dir / "adapter_model.safetensors")
    scale = QUICK.alpha / QUICK.rank
    base, merged = load_tiny().eval(), load_tiny().eval()
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name.endswith("lora_A.weight"):
                weight = merged.get_parameter(name.removeprefix("base_model.model.").replace(".lora_A", ""))
                weight.copy_(weight.float() + scale * tensors[name.replace("lora_A", "lora_B")] @ tensor)
    for probe in read_manifest(result.adapter_dir).fingerprint.probes:
        row = Row(torch.tensor(probe.token_ids).numpy(), 1)
        assert token_logprobs(merged, row) == pytest.approx(probe.adapter_logprobs, abs=0.02)
        assert token_logprobs(base, row) == pytest.approx(probe.base_logprobs, abs=0.02)
        apart = torch.tensor(probe.adapter_logprobs) - torch.tensor(probe.base_logprobs)
        assert apart.abs().mean() > 0.1


def test_finished_adapter_returns_at_once(result: TrainResult, job: TrainJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    again = launch.train(job, result.adapter_dir)
    assert again.reused
    assert again.manifest == result.manifest


def test_folder_of_another_job_is_left_alone(result: TrainResult, job: TrainJob, tmp_path: Path) -> None:
    other = job.model_copy(update={"settings": QUICK.model_copy(update={"seed": 7})})
    with pytest.raises(TrainFailed, match="another job"):
        launch.train(other, result.adapter_dir)
    with pytest.raises(TrainFailed, match="no finished adapter"):
        launch.train(job, tmp_path)


def test_reason_of_a_bad_dataset_comes_through(job: TrainJob, tmp_path: Path) -> None:
    empty = job.model_copy(update={"dataset": write_dataset(tmp_path / "empty.jsonl", [])})
    with pytest.raises(TrainFailed, match="no row to train on") as failed:
        launch.train(empty, tmp_path / "adapter")
    assert "Traceback" in failed.value.log_tail


def test_time_limit(job: TrainJob, tmp_path: Path) -> None:
    hasty = job.model_copy(update={"settings": QUICK.model_copy(update={"max_seconds": 0.5})})
    with pytest.raises(TrainFailed, match="longer than max_seconds"):
        launch.train(hasty, tmp_path / "adapter")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_trainer_ends_with_its_parent(job: TrainJob, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "job.json").write_text(job.model_dump_json())
    code = (
        "from pathlib import Path; from train import launch; from train.settings import TrainJob\n"
        f"job = TrainJob.model_validate_json(Path({str(tmp_path / 'job.json')!r}).read_text())\n"
        f"launch.train(job, Path({str(tmp_path / 'adapter')!r}))\n"
    )
    partial = tmp_path / "adapter.partial"
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(launch.__file__).parents[1]) as parent:
        trainer = started_trainer(partial)
        parent.send_signal(number)
        parent.wait()
    gone, alive = psutil.wait_procs([trainer], timeout=60)
    assert gone
    assert not alive


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "ended by SIGKILL"), (signal.SIGTERM, "stopped by a signal")]
)
def test_killed_trainer_fails_with_reason_and_log(
    job: TrainJob, tmp_path: Path, number: signal.Signals, reason: str
) -> None:
    out_dir = tmp_path / "adapter"
    partial = out_dir.with_name("adapter.partial")
    killer = threading.Thread(target=lambda: started_trainer(partial).send_signal(number))
    killer.start()
    with pytest.raises(TrainFailed, match=reason) as failed:
        launch.train(job, out_dir)
    killer.join()
    assert "trainer" in failed.value.log_tail
    assert not out_dir.exists()


def test_events_survive_the_pipe() -> None:
    for event in (Progress(1, 2, 0.5, 0.1), Progress(1, 2, 0.5), Failed("no")):
        assert events.decode(events.encode(event)) == event
    for line in (b"", b"{", b"[]", b'{"event": "progress"}', b'{"event": "later", "x": 1}', b"null"):
        assert events.decode(line) is None


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"format": 2})])
def test_bad_manifests_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BadManifest):
        read_manifest(tmp_path)
