"""`kvloop up`: starts worker, gateway, follower and scheduler, keeps them alive, and stops them in order.

The supervisor holds no state that matters: everything durable is in the home folder, so it may be killed at any
moment and started again. One supervisor per home, by a lock on `run/supervisor.lock`. What a killed one left behind is
gone before anything is started; a port that another program holds is an error, never mistaken for a process of ours.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import psutil

from loop.config import Config, secret_file, with_shared_layers
from loop.processes import Child, python_module
from memory.files import write_atomic
from memory.kv.keyring import master_key
from serve.gateway.auth import read_keys
from serve.pull import pull
from serve.worker.settings import WorkerSettings

READY_SECONDS = 120.0
GRACE_SECONDS = 45.0  # more than any child takes to finish its streams or to write what waits for the disk
WATCH_SECONDS = 0.2
SAME_START_SECONDS = 2.0


class SupervisorError(RuntimeError):
    """The processes could not be started; the message holds the end of the log of the one that failed."""


@dataclass(frozen=True)
class Addresses:
    gateway: str
    worker: str


def run_folder(home: Path) -> Path:
    return home / "run"


def read_state(home: Path) -> dict[str, Any]:
    """What the supervisor of `home` wrote last; empty where it was stopped. Its word: it may have been killed since."""
    try:
        state: dict[str, Any] = json.loads((run_folder(home) / "state.json").read_text())
    except FileNotFoundError:
        return {}
    return state


def running_state(home: Path) -> dict[str, Any]:
    """`read_state` while the supervisor that wrote it runs, else empty."""
    state = read_state(home)
    return state if state and _find(state["pid"], state.get("started")) else {}


def _find(pid: int | None, started: float | None) -> psutil.Process | None:
    """The running process with this id that started at this moment (seconds since the epoch): ids come round again."""
    if pid is None or started is None:
        return None
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < SAME_START_SECONDS
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def end_leftovers(home: Path, grace: float) -> None:
    """Waits for the children of a supervisor that was killed (they were told to end); kills them after `grace` s."""
    entries = read_state(home).get("processes", {}).values()
    left = [process for entry in entries if (process := _find(entry["pid"], entry.get("started")))]
    for process in psutil.wait_procs(left, timeout=grace)[1]:
        process.kill()
    psutil.wait_procs(left)


def refuse_taken(setting: str, host: str, port: int) -> None:
    """Raises `SupervisorError` when a program listens where one of ours is to listen."""
    try:
        with socket.create_connection((host, port), timeout=1):
            pass
    except OSError:
        return
    raise SupervisorError(f"another program listens on {host}:{port}: stop it, or set {setting} to another port")


@contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Holds the home's lock; a second supervisor on the same home is refused."""
    run_folder(home).mkdir(parents=True, exist_ok=True)
    with (run_folder(home) / "supervisor.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SupervisorError(f"kvloop already runs on {home}: see `kvloop status`") from None
        yield


def _refuse_bad_keys(file: Path | None) -> None:
    try:
        if file is not None:
            read_keys(file)
    except (OSError, ValueError) as error:
        raise SupervisorError(f"setting gateway.keys_file: {error}") from None


def _refuse_bad_keyring(settings: WorkerSettings) -> None:
    """Makes the keyring of KV memory where there is none. Raises `KeyringError` and `SupervisorError`."""
    keyring = settings.kv.keyring
    if keyring is None or settings.kv_folder is None or not settings.kv.encryption:
        return
    try:
        master_key(keyring)
    except OSError as error:
        raise SupervisorError(f"setting worker.kv.keyring: {error}") from None


class Supervisor:
    """Starts and watches the processes of one install. Use from the main thread, inside `only_one`."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._say = say
        self._stop = False
        for name in ("secret", "admin-token"):
            secret_file(config.home / name)
        model_dir = pull(config.model, config.home / "models")
        self._config = config = with_shared_layers(config, model_dir)
        self._worker_settings = config.worker.model_copy(update={"model": model_dir})
        self._gateway_settings = config.gateway.model_copy(update={"model_dir": model_dir})
        self.addresses = Addresses(
            gateway=f"http://{config.gateway.host}:{config.gateway.port}",
            worker=f"http://{config.worker.host}:{config.worker.port}",
        )
        self.children = [self._child(name, command) for name, command in self._commands().items()]

    def _commands(self) -> dict[str, list[str]]:
        run = run_folder(self._config.home)
        for name, settings in (("worker", self._worker_settings), ("gateway", self._gateway_settings)):
            write_atomic(run / f"{name}.json", settings.model_dump_json(indent=2).encode(), mode=0o600)
        write_atomic(run / "config.json", self._config.model_dump_json(indent=2).encode(), mode=0o600)
        inherited = ("--config-file", str(run / "config.json"))
        return {
            "worker": python_module("serve.worker", "--settings", str(run / "worker.json")),
            "gateway": python_module("serve.gateway", "--settings", str(run / "gateway.json")),
            "follower": python_module("loop.follower", *inherited),
            "scheduler": python_module("loop.scheduler", *inherited),
        }

    def _child(self, name: str, command: list[str]) -> Child:
        log = run_folder(self._config.home) / f"{name}.log"
        threads = self._config.worker.threads if name == "worker" else 1
        return Child(name, command, log, self._config.restart_backoff_seconds, threads)

    def start(self) -> None:
        """Starts everything and returns when the API answers. Raises `SupervisorError`, after stopping all."""
        end_leftovers(self._config.home, GRACE_SECONDS)
        refuse_taken("worker.port", self._config.worker.host, self._config.worker.port)
        refuse_taken("gateway.port", self._config.gateway.host, self._config.gateway.port)
        _refuse_bad_keys(self._config.gateway.keys_file)
        _refuse_bad_keyring(self._config.worker)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        try:
            for child in self.children:
                child.start()
            self._write_state()
            self._wait_ready(f"{self.addresses.worker}/health", self.children[0])
            self._wait_ready(f"{self.addresses.gateway}/health", self.children[1])
        except BaseException:
            self.stop()
            raise

    def watch(self) -> None:
        """Blocks until SIGINT or SIGTERM, restarting whatever dies."""
        while not self._stop:
            for child in self.children:
                if child.ensure_running():
                    self._say(f"{child.name} ended with code {child.exit_code}; starting it again")
            self._write_state()
            time.sleep(WATCH_SECONDS)

    def stop(self) -> None:
        """Stops in the order in which nothing acknowledged can be lost: no new work first, the worker last."""
        for name in ("scheduler", "follower", "gateway", "worker"):
            next(child for child in self.children if child.name == name).stop(GRACE_SECONDS)
        state = run_folder(self._config.home) / "state.json"
        state.unlink(missing_ok=True)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._stop = True

    def _wait_ready(self, url: str, child: Child) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and not self._stop:
            if child.exit_code is not None:
                raise SupervisorError(f"{child.name} ended with code {child.exit_code}:\n{child.last_log_lines()}")
            try:
                if httpx.get(url, timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet: that is what this loop waits for
            time.sleep(0.05)
        if not self._stop:
            raise SupervisorError(f"{child.name} was not ready after {READY_SECONDS:.0f} s:\n{child.last_log_lines()}")

    def _write_state(self) -> None:
        state = {
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
            "gateway": self.addresses.gateway,
            "worker": self.addresses.worker,
            "processes": {child.name: child.state() for child in self.children},
        }
        data = json.dumps(state, indent=2).encode()
        path = run_folder(self._config.home) / "state.json"
        if not path.exists() or path.read_bytes() != data:
            write_atomic(path, data)
