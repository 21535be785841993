"""`kvloop up` as a process: it says the truth, restarts what dies, ends cleanly, and leaves nobody behind."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from rich.console import Console

from loop.config import load
from loop.processes import Child, python_module
from loop.status import collect, render
from tests.running import Running

PROCESSES = ("worker", "gateway", "follower", "scheduler")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Running]:
    """One install that the tests of this module share, in the order in which they stand; the last one stops it."""
    running = Running(tmp_path_factory.mktemp("supervised") / "home", tiny_model_dir)
    running.start()
    yield running
    running.stop()


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {seconds:.0f} s"
        time.sleep(0.05)


def state_of(running: Running) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((running.home / "run" / "state.json").read_text())
    return state


def pids(running: Running) -> dict[str, int]:
    return {name: process["pid"] for name, process in state_of(running)["processes"].items()}


def restarts(running: Running, name: str) -> int:
    count: int = state_of(running)["processes"][name]["restarts"]
    return count


def status_of(running: Running) -> dict[str, Any]:
    """What `kvloop status` would print, without starting an interpreter for it."""
    return collect(load((), running.home, {}))


def ask(running: Running) -> str:
    with running.client() as client:
        reply = client.chat.completions.create(
            model="kvloop", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )
    return reply.choices[0].finish_reason


def test_status_tells_the_truth(running: Running) -> None:
    assert ask(running) in ("stop", "length")
    found = running.json("status")
    assert found["processes"] == status_of(running)["processes"]
    assert found["running"] is True
    assert tuple(found["processes"]) == PROCESSES
    commands = {name: psutil.Process(process["pid"]).cmdline() for name, process in found["processes"].items()}
    modules = {"worker": "serve.worker", "gateway": "serve.gateway", "follower": "loop.follower"}
    for name, module in (modules | {"scheduler": "loop.scheduler"}).items():
        assert module in commands[name]
    assert {process["restarts"] for process in found["processes"].values()} == {0}
    assert found["gateway"] == {"status": "ok", "workers": 1, "workers_up": 1}
    assert found["memory"]["kvloop_kv_bytes{tier=ram}"] > 0
    assert (found["serving"], found["last_run"], found["last_move"]) == ({"name": "base"}, None, None)
    lines = io.StringIO()
    render(found, Console(file=lines, width=200))
    assert f"worker     {found['processes']['worker']['pid']}" in lines.getvalue()


def test_what_is_secret_is_private(running: Running) -> None:
    private = [running.home / name for name in ("secret", "admin-token")]
    private += [running.home / "run" / name for name in ("config.json", "gateway.json", "worker.json")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}


def test_internal_routes_need_the_admin_token(running: Running) -> None:
    url = f"{running.url}/internal/versions"
    assert httpx.get(url, timeout=30).status_code in (401, 403, 404)
    token = (running.home / "admin-token").read_text().strip()
    assert httpx.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=30).json()["serving"] == "base"


def test_nobody_listens_beyond_this_machine(running: Running) -> None:
    for name in ("worker", "gateway"):
        listening = psutil.Process(pids(running)[name]).net_connections("inet")
        addresses = {connection.laddr.ip for connection in listening if connection.status == psutil.CONN_LISTEN}
        assert addresses == {"127.0.0.1"}


def test_a_second_up_is_refused_and_disturbs_nothing(running: Running) -> None:
    before = pids(running)
    second = running.run("up", check=False)
    assert second.returncode == 2
    assert len(second.stderr.strip().splitlines()) == 1
    assert pids(running) == before
    ask(running)


def test_what_dies_is_started_again_and_counted(running: Running) -> None:
    before = pids(running)
    for name in PROCESSES:
        running.kill(name)
    for name in PROCESSES:
        wait_for(lambda name=name: restarts(running, name) == 1 and pids(running)[name], f"{name} started again")
    running.wait_ready()
    assert all(pids(running)[name] != before[name] for name in PROCESSES)
    assert ask(running) in ("stop", "length")
    assert {process["restarts"] for process in status_of(running)["processes"].values()} == {1}
    assert "worker ended with code -9; starting it again" in (running.home / "up.log").read_text()


def test_a_killed_supervisor_takes_its_children_along_and_can_start_at_once(running: Running) -> None:
    children = pids(running)
    running.kill("supervisor")
    assert status_of(running)["running"] is False
    running.start()
    assert not any(_runs(pid) for pid in children.values())
    assert set(pids(running)) == set(PROCESSES)
    assert {process["restarts"] for process in status_of(running)["processes"].values()} == {0}
    ask(running)


def test_ctrl_c_stops_everything(running: Running) -> None:
    children = pids(running)
    assert running.stop() == 0
    assert not any(_runs(pid) for pid in children.values())
    for port in (running.gateway_port, running.worker_port):
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
    assert not (running.home / "run" / "state.json").exists()
    assert (running.home / "up.log").read_text().rstrip().endswith("stopped")


def test_sigterm_in_the_middle_of_starting_stops_everything(running: Running) -> None:
    with (running.home / "up.log").open("ab") as log:
        running.process = subprocess.Popen(running.command("up"), stdout=log, stderr=log)
    wait_for((running.home / "run" / "state.json").exists, "the children are started")
    children = pids(running)
    running.process.terminate()
    assert running.process.wait(60) == 0
    assert not any(_runs(pid) for pid in children.values())
    assert "Traceback" not in (running.home / "up.log").read_text()


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


class TestChild:
    """One supervised process by itself."""

    def child(self, tmp_path: Path, code: str, backoff: float = 0.05) -> Child:
        return Child("it", [*python_module("timeit")[:1], "-c", code], tmp_path / "log", backoff)

    def test_one_that_keeps_dying_is_started_less_and_less_often(self, tmp_path: Path) -> None:
        child = self.child(tmp_path, "print('once')", backoff=0.2)
        child.start()
        began, deaths = time.monotonic(), 0
        moments: list[float] = []
        while child.restarts < 3:
            assert time.monotonic() - began < 60
            before = child.restarts
            deaths += child.ensure_running()
            if child.restarts > before:
                moments.append(time.monotonic() - began)
            time.sleep(0.005)
        child.stop(10)
        assert deaths == 3, "each death is told once"
        pauses = [later - earlier for earlier, later in zip([0.0, *moments], moments, strict=False)]
        assert [pause >= least for pause, least in zip(pauses, (0.2, 0.4, 0.8), strict=True)] == [True, True, True]
        assert child.last_log_lines(2).splitlines() == ["once", "once"]

    def test_one_that_does_not_listen_is_ended(self, tmp_path: Path) -> None:
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(60)"
        child = self.child(tmp_path, code)
        child.start()
        wait_for(lambda: "deaf" in child.last_log_lines(), "it is up")
        child.stop(0.2)
        assert child.exit_code == -signal.SIGKILL
        assert child.state() == {"pid": None, "started": None, "restarts": 0}

    def test_it_dies_with_its_parent(self, tmp_path: Path) -> None:
        code = (
            "import sys, time; from pathlib import Path; from loop.processes import Child\n"
            "command = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
            f"child = Child('it', command, Path({str(tmp_path / 'log')!r}), 1)\n"
            "child.start(); print(child.pid, flush=True); time.sleep(60)"
        )
        command = [*python_module("x")[:1], "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert _runs(pid)
            os.kill(parent.pid, signal.SIGKILL)
        wait_for(lambda: not _runs(pid), "the child is gone")
