"""A real `kvloop up` in a process of its own, for tests that restart and kill things."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.ports import free_port

READY_SECONDS = 90


class Running:
    """One install of kvloop under test. `start` may be called again after the supervisor was killed."""

    def __init__(self, home: Path, model: Path, *settings: str) -> None:
        self.home = home
        self.model = model
        self.gateway_port, self.worker_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.gateway_port}"
        self._settings = (
            f"model={json.dumps(str(model))}",
            f"gateway.port={self.gateway_port}",
            f"worker.port={self.worker_port}",
            "restart_backoff_seconds=0.1",
            *settings,
        )
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *arguments: str) -> list[str]:
        options = [part for setting in self._settings for part in ("--set", setting)]
        return [sys.executable, "-m", "loop.cli", "--home", str(self.home), *options, *arguments]

    def start(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / "up.log").open("ab") as log:
            self.process = subprocess.Popen(self.command("up"), stdout=log, stderr=log)
        self.wait_ready()

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, (self.home / "up.log").read_text()
            if all(self._healthy(port) for port in (self.worker_port, self.gateway_port)):
                return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {seconds} s:\n{(self.home / 'up.log').read_text()}")

    def _healthy(self, port: int) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def pid(self, name: str) -> int | None:
        """Process id of `worker`, `gateway`, `follower`, `scheduler` or `supervisor`, while it runs."""
        if name == "supervisor":
            return self.process.pid if self.process and self.process.poll() is None else None
        try:
            state = json.loads((self.home / "run" / "state.json").read_text())
        except FileNotFoundError:
            return None
        return state["processes"][name]["pid"]

    def kill(self, name: str) -> None:
        """kill -9, and for the supervisor also waits for it."""
        pid = self.pid(name)
        if pid is not None:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return  # it died between the look and the kill
        if name == "supervisor" and self.process is not None:
            self.process.wait()

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs another kvloop command on the same home."""
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **{"max_retries": 0, "timeout": 60, **options})

    def stop(self) -> int:
        """Ctrl-C; returns the exit code."""
        if self.process is None or self.process.poll() is not None:
            return -1
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)
