"""Runs one command at a time as a subprocess, and stops it when asked.

Invariants: two commands of one runner never overlap; a command that fails at once is not tried again at once; the
command does not outlive `stop`, but does outlive a kill of this process (its run's lease keeps others away).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_log = logging.getLogger(__name__)
_LONGEST_PAUSE = 3600.0
_MOST_LOG_BYTES = 4 << 20


class CommandRunner:
    """Thread-safe. Output of the command goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path, pause: float, patience: float = 20.0) -> None:
        """`pause` is the first pause after a failure (s), `patience` how long a stopped command may take to end (s)."""
        self._command = list(command)
        self._log_file = log
        self._pause = pause
        self._patience = patience
        self._turn = threading.Lock()
        self._state = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._failures = 0
        self._not_before = 0.0

    def run(self, why: str, after_failure: bool = False) -> int | None:
        """Runs the command to its end and returns its exit status; None when it was not its turn.

        It is not while a command runs, after `stop`, or in the pause after a failure unless `after_failure` is set.
        """
        if not self._turn.acquire(blocking=False):
            _log.info("%s: the command runs already", why)
            return None
        try:
            if time.monotonic() < self._not_before and not after_failure:
                return None
            status = self._run(why)
            if status is not None:
                self._failures = self._failures + 1 if status else 0
                pause = min(self._pause * 2**self._failures, _LONGEST_PAUSE)
                self._not_before = time.monotonic() + pause if status else 0.0
            return status
        finally:
            self._turn.release()

    def _run(self, why: str) -> int | None:
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        if self._log_file.exists() and self._log_file.stat().st_size > _MOST_LOG_BYTES:
            self._log_file.replace(self._log_file.with_suffix(".old"))
        with self._log_file.open("ab") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {why}: {self._command}\n".encode())
            log.flush()
            with self._state:
                if self._stopped:
                    return None
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            status = self._process.wait()
        _log.log(logging.WARNING if status else logging.INFO, "%s: ended with status %d", why, status)
        with self._state:
            self._process = None
        return status

    def stop(self) -> None:
        """Interrupts a running command (SIGINT, then SIGKILL) and refuses to start another."""
        with self._state:
            self._stopped = True
            process = self._process
        if process is None:
            return
        _signal(process, signal.SIGINT)
        try:
            process.wait(self._patience)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)
