"""One child process that is kept alive: started, watched, restarted with backoff, stopped cleanly.

A child dies with the thread that started it (Linux's parent-death signal), so children are started from the
main thread only, and a supervisor that is killed leaves nobody behind that would hold its port.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1
MAX_BACKOFF_SECONDS = 30.0
STABLE_SECONDS = 20.0
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """A supervised process. Not thread-safe: one supervisor's main loop owns it."""

    def __init__(self, name: str, command: Sequence[str], log: Path, backoff: float, threads: int = 1) -> None:
        self.name = name
        self.restarts = 0
        self._command = list(command)
        self._log = log
        self._first_backoff = self._backoff = backoff
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._next_start = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Starts the process; its output is appended to its log file."""
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
        if self._threads:
            environment["OMP_NUM_THREADS"] = str(self._threads)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=_die_with_parent,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then stops children in order
            )
        self._started = time.monotonic()

    def ensure_running(self) -> bool:
        """Restarts the process if it died and its backoff is over. Returns whether it died since the last call."""
        if self._process is None or self._process.poll() is None:
            return False
        now = time.monotonic()
        died_now = self._next_start == 0.0
        if died_now:
            if now - self._started > STABLE_SECONDS:
                self._backoff = self._first_backoff
            self._next_start = now + self._backoff
            self._backoff = min(self._backoff * 2, MAX_BACKOFF_SECONDS)
        if now >= self._next_start:
            self._next_start = 0.0
            self.restarts += 1
            self.start()
        return died_now

    def state(self) -> dict[str, Any]:
        """Process id and start (seconds since the epoch), null while it is down, and the number of restarts."""
        pid = self.pid
        try:
            started = psutil.Process(pid).create_time() if pid else None
        except psutil.NoSuchProcess:
            pid = started = None
        return {"pid": pid, "started": started, "restarts": self.restarts}

    @property
    def exit_code(self) -> int | None:
        return self._process.poll() if self._process else None

    def stop(self, grace: float) -> None:
        """Asks the process to end, and ends it after `grace` seconds."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_log_lines(self, count: int = 15) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join(text.splitlines()[-count:])


def python_module(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]
