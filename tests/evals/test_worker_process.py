from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from evals.errors import WorkerLost, WorkerStartFailed
from evals.settings import EvalSettings
from evals.worker_process import own_worker
from serve.backends.client import CompletionsClient

FAKE = Path(__file__).with_name("fake_worker.py")
COMMAND = (sys.executable, str(FAKE))
SETTINGS = EvalSettings(start_seconds=20)


def running() -> list[int]:
    """Fake workers this test process started and that still run."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if str(FAKE) in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert running() == []


def test_the_worker_serves_within_the_context_and_is_gone_after() -> None:
    with own_worker(Path("model"), "base", SETTINGS, COMMAND) as url:
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        assert len(running()) == 1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)


def test_an_error_of_the_caller_stops_the_worker_and_passes() -> None:
    with pytest.raises(ZeroDivisionError), own_worker(Path("model"), "base", SETTINGS, COMMAND):
        raise ZeroDivisionError


def test_a_worker_that_does_not_start_shows_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER", "exit")
    with (
        pytest.raises(WorkerStartFailed, match="exited; its log ends with:\nfake worker: these weights cannot be read"),
        own_worker(Path("model"), "base", SETTINGS, COMMAND),
    ):
        pass


def test_a_worker_that_is_never_ready_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER", "deaf")
    with (
        pytest.raises(WorkerStartFailed, match=r"not ready after 0\.5 s; its log is empty"),
        own_worker(Path("model"), "base", EvalSettings(start_seconds=0.5), COMMAND),
    ):
        pass


def test_a_worker_that_crashes_in_use_shows_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> None:
        async with CompletionsClient(url) as client:
            await client.prompt_logprobs("base", [[1, 2]])

    monkeypatch.setenv("FAKE_WORKER", "crash")
    with (
        pytest.raises(WorkerLost, match="ended with status 3; its log ends with:\nfake worker: out of luck"),
        own_worker(Path("model"), "base", SETTINGS, COMMAND) as url,
    ):
        asyncio.run(ask(url))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_the_worker_dies_with_an_evaluation_that_is_killed() -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom evals.settings import EvalSettings\n"
        "from evals.worker_process import own_worker\n"
        f"with own_worker(Path('m'), 'base', EvalSettings(), ({sys.executable!r}, {str(FAKE)!r})) as url:\n"
        "    print(url, flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as evaluation:
        assert evaluation.stdout is not None
        url = evaluation.stdout.readline().strip()
        assert len(running()) == 1
        os.kill(evaluation.pid, signal.SIGKILL)
        evaluation.wait()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            httpx.get(f"{url}/health", trust_env=False)
        except httpx.HTTPError:
            return
        time.sleep(0.05)
    pytest.fail("the worker outlived its evaluation")
