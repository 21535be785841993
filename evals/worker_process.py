"""A worker of the evaluation's own, so that measuring takes nothing from serving.

Invariant: when the context ends, for whatever reason, the process and its children are gone. Where the system can
(Linux), the worker also dies when this process is killed outright.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from evals.errors import WorkerLost, WorkerStartFailed
from evals.settings import EvalSettings
from serve.backends.base import WorkerUnavailable
from serve.worker.settings import WorkerSettings

_ROOT = Path(__file__).parents[1]
_TRIES = 3
_LOG_TAIL = 4000
_STOP_SECONDS = 10.0
_EXIT_SECONDS = 2.0
_LOG = "worker.log"
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
WORKER_COMMAND = (sys.executable, "-m", "serve.worker")


@contextlib.contextmanager
def own_worker(
    model_dir: Path, served_name: str, settings: EvalSettings, command: Sequence[str] = WORKER_COMMAND
) -> Iterator[str]:
    """Starts a worker for `model_dir` on a free loopback port and gives its URL once it is ready; stops it after.

    Raises `WorkerStartFailed` when it exits or is not ready in `settings.start_seconds`, and `WorkerLost` when it
    exits while it is used, each with the tail of its log.
    """
    with tempfile.TemporaryDirectory(prefix="kvloop-evals-") as name:
        folder = Path(name)
        process, url = _start(folder, model_dir, served_name, settings, command)
        try:
            yield url
        except WorkerUnavailable as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_EXIT_SECONDS)
                raise WorkerLost(f"the evaluation's worker ended with status {status}; {_ending(folder)}") from error
            raise
        finally:
            _stop(process)


def _start(
    folder: Path, model_dir: Path, served_name: str, settings: EvalSettings, command: Sequence[str]
) -> tuple[subprocess.Popen[bytes], str]:
    log = folder / _LOG
    for attempt in range(_TRIES):
        port = _free_port()
        file = folder / "worker.json"
        file.write_text(_worker_settings(model_dir, served_name, port, settings).model_dump_json())
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--settings", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(settings),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        url = f"http://127.0.0.1:{port}"
        try:
            ready = _wait(process, url, settings.start_seconds)
        except BaseException:
            _stop(process)
            raise
        if ready:
            return process, url
        exited = process.poll() is not None
        _stop(process)
        # Another process may have taken the port between our choice and the worker's start.
        if not exited or "in use" not in _ending(folder) or attempt == _TRIES - 1:
            what = "exited" if exited else f"was not ready after {settings.start_seconds:g} s"
            raise WorkerStartFailed(f"the evaluation's worker {what}; {_ending(folder)}")
    raise AssertionError("unreachable")


def _worker_settings(model_dir: Path, served_name: str, port: int, settings: EvalSettings) -> WorkerSettings:
    return WorkerSettings(
        model=model_dir, served_name=served_name, port=port, dtype=settings.dtype, threads=settings.threads
    )


def _wait(process: subprocess.Popen[bytes], url: str, seconds: float) -> bool:
    """Whether the worker became ready before it exited or the time was over."""
    until = time.monotonic() + seconds
    with httpx.Client(trust_env=False, timeout=2.0) as client:
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{url}/health").status_code == 200:
                    return process.poll() is None
            time.sleep(0.1)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks, then kills the whole process group, and reaps it."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(settings: EvalSettings) -> dict[str, str]:
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(settings.threads or os.cpu_count() or 1),
        # Threads that spin while they wait take the cores that serving needs.
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }


def _die_with_parent() -> None:
    """Runs in the child before the worker: nothing but one system call, so that it is safe beside threads."""
    if _LIBC is not None:
        _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ending(folder: Path) -> str:
    log = folder / _LOG
    text = log.read_bytes()[-_LOG_TAIL:].decode(errors="replace").strip() if log.exists() else ""
    return f"its log ends with:\n{text}" if text else "its log is empty"
