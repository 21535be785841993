"""Runs a training job in a process of its own, so that it can crash or be killed without touching its caller.

Invariants: `out_dir` is absent or a whole adapter, because it is renamed into place; an attempt that failed leaves
its log in `<out_dir>.partial`, which the next attempt replaces; no trainer outlives the caller.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from memory.files import sync_folder, write_atomic
from train.events import Failed, Progress, decode
from train.settings import TrainJob

JOB = "job.json"
LOG = "train.log"
_MANIFEST = "manifest.json"
_METRICS = "metrics.json"
_LOG_TAIL = 4000
_ROOT = Path(__file__).parents[1]


class TrainFailed(RuntimeError):
    """Training ended without an adapter: `reason` for the user, `log_tail` with the last of the trainer's log."""

    def __init__(self, reason: str, log_tail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.log_tail = log_tail


@dataclass(frozen=True)
class TrainResult:
    """A finished adapter: a PEFT folder with its manifest, the metrics in it, and whether it was there already."""

    adapter_dir: Path
    manifest: dict[str, Any]
    metrics: dict[str, Any]
    reused: bool


def train(job: TrainJob, out_dir: Path, on_progress: Callable[[Progress], None] | None = None) -> TrainResult:
    """Trains `job` and returns the adapter in `out_dir`; returns at once when it is already there.

    `on_progress` is called in this thread after each optimizer step. Raises `TrainFailed` when the trainer fails, is
    killed or takes longer than the job allows, or when `out_dir` holds something else. When the caller is
    interrupted, the trainer is killed first.
    """
    if out_dir.exists():
        return _finished(job, out_dir)
    folder = out_dir.with_name(f"{out_dir.name}.partial")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_atomic(folder / JOB, job.model_dump_json(indent=1).encode())
    _run(job, folder, on_progress)
    folder.rename(out_dir)
    sync_folder(out_dir.parent)
    return _result(out_dir, reused=False)


def _finished(job: TrainJob, out_dir: Path) -> TrainResult:
    try:
        made_from = TrainJob.model_validate_json((out_dir / JOB).read_bytes())
        result = _result(out_dir, reused=True)
    except (OSError, ValueError) as error:
        raise TrainFailed(f"{out_dir} exists and is no finished adapter ({error}): choose another folder") from error
    if made_from != job:
        raise TrainFailed(f"{out_dir} holds the adapter of another job: choose another folder")
    return result


def _result(out_dir: Path, *, reused: bool) -> TrainResult:
    manifest = json.loads((out_dir / _MANIFEST).read_text(encoding="utf-8"))
    metrics = json.loads((out_dir / _METRICS).read_text(encoding="utf-8"))
    return TrainResult(out_dir, manifest, metrics, reused)


def _run(job: TrainJob, folder: Path, on_progress: Callable[[Progress], None] | None) -> None:
    command = [sys.executable, "-m", "train.run", "--job", str(folder / JOB), "--folder", str(folder)]
    command += ["--parent", str(os.getpid())]
    timed_out = threading.Event()
    failed: Failed | None = None
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=_environment(job),
            start_new_session=True,
        )

        def give_up() -> None:
            timed_out.set()
            _kill(process)

        timer = threading.Timer(job.settings.max_seconds, give_up)
        timer.start()
        try:
            assert process.stdout is not None
            failed = _follow(process.stdout, on_progress)
            status = process.wait()
        finally:
            timer.cancel()
            _kill(process)
            process.wait()
            timer.join()
            if process.stdout is not None:
                process.stdout.close()
    if timed_out.is_set():
        raise TrainFailed(f"took longer than max_seconds ({job.settings.max_seconds:g})", _tail(folder / LOG))
    if status != 0 or failed is not None:
        raise TrainFailed(failed.reason if failed else _describe(status), _tail(folder / LOG))


def _follow(stdout: IO[bytes], on_progress: Callable[[Progress], None] | None) -> Failed | None:
    failed = None
    for line in stdout:
        event = decode(line)
        if isinstance(event, Failed):
            failed = event
        elif event is not None and on_progress is not None:
            on_progress(event)
    return failed


def _environment(job: TrainJob) -> dict[str, str]:
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(job.settings.threads or os.cpu_count() or 1),
        # Threads that spin for long take the cores that serving needs; threads that sleep at once between two small
        # products lose more than the second core brings. A few microseconds of spinning have the best of both.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "30000",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the trainer and what it started; nothing when it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _describe(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        hint = " (out of memory?)" if -status == signal.SIGKILL else ""
        return f"the trainer was ended by {name}{hint}"
    return f"the trainer ended with exit status {status}"


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL))
        return file.read().decode(errors="replace")
