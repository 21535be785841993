"""`kvloop status`: what it says of KV memory and of refreshing, to programs and to people."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loop import status
from loop.config import load

REFRESH = {
    "enabled": True, "waiting": 12, "done": 3, "failed": 1, "eta_seconds": 40.2, "waits_for": None,
    "current": {"session_id": "sess_1", "reason": "promote", "tokens": 4128, "seconds": 2.6},
}  # fmt: skip
UPKEEP = {
    "active": True, "moved": {"by_age": 2, "by_budget": 3, "saved_bytes": 5 * 2**20}, "expired": 4, "offloaded": 0,
    "scrubbed": {"files": 70, "bytes": 1, "bad": 1, "orphans": 0, "passes": 1}, "errors": 0, "trouble": "",
}  # fmt: skip
HOLDINGS = [
    {"fidelity": "int4", "chunks": 1, "tokens": 256, "bytes": 1000, "raw_bytes": 4000},
    {"fidelity": "exact", "chunks": 2, "tokens": 500, "bytes": 6000, "raw_bytes": 9000},
    {"fidelity": "int4", "chunks": 1, "tokens": 244, "bytes": 1000, "raw_bytes": 4000},
]
TOKEN = "of the test"


class _Both(BaseHTTPRequestHandler):
    """A gateway and a worker at one address."""

    def do_GET(self) -> None:
        told: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/internal/refresh": REFRESH,
            "/v1/kv/report": {"holdings": HOLDINGS, "upkeep": UPKEEP},
        }
        secret = self.path.startswith("/internal")
        if self.server.failing:  # type: ignore[attr-defined]
            self._answer(500, b"Internal Server Error")
        elif self.path == "/metrics":
            self._answer(200, b'kvloop_kv_bytes{tier="disk"} 1048576\nkvloop_kv_budget_bytes{tier="disk"} 2097152\n')
        elif secret and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(404, b"{}")
        else:
            self._answer(200, json.dumps(told[self.path]).encode())

    def _answer(self, code: int, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """The tests say what went wrong."""


class _Server(ThreadingHTTPServer):
    failing = False


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    """An install that seems to run."""
    server = _Server(("127.0.0.1", 0), _Both)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(status, "running_state", lambda home: {"gateway": url, "worker": url, "processes": {}})
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def shown(found: dict[str, Any]) -> list[str]:
    console = Console(width=200, file=io.StringIO())
    status.render(found, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("running")
def test_rungs_upkeep_and_refresh_are_told(tmp_path: Path) -> None:
    (tmp_path / "admin-token").write_text(f"{TOKEN}\n")
    found = status.collect(load((), tmp_path, {}))
    assert json.loads(json.dumps(found)) == found
    assert (found["refresh"], found["upkeep"]) == (REFRESH, UPKEEP)
    assert [(rung["fidelity"], rung["tokens"], rung["ratio"]) for rung in found["rungs"]] == [
        ("exact", 500, 1.5),
        ("int4", 500, 4.0),
    ]
    lines = shown(found)
    assert "memory    disk 1 of 2 MiB" in lines
    assert "rungs     exact 500 tokens in 0 MiB (1.50x), int4 500 tokens in 0 MiB (4.00x)" in lines
    assert "upkeep    5 chunks moved down, 5 MiB saved; 70 files verified, 1 bad; 4 chunks expired" in lines
    (line,) = [line for line in lines if line.startswith("refresh")]
    for words in ("3 done, 12 waiting, 1 failed", "now sess_1, 4,128 tokens, since 3 s", "about 40 s left"):
        assert words in line


@pytest.mark.usefixtures("running")
def test_without_the_admin_token_refreshing_is_not_told(tmp_path: Path) -> None:
    assert status.collect(load((), tmp_path, {}))["refresh"] is None
    (tmp_path / "admin-token").write_text("wrong")
    assert status.collect(load((), tmp_path, {}))["refresh"] is None


def test_parts_that_fail_are_told_as_null(running: _Server, tmp_path: Path) -> None:
    running.failing = True
    found = status.collect(load((), tmp_path, {}))
    assert found["running"] is True
    assert [found[name] for name in ("gateway", "memory", "rungs", "upkeep", "refresh")] == [None] * 5
    shown(found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enabled": False}, "switched off"),
        ({"current": None, "eta_seconds": None, "waits_for": "the workers are busy"}, "waits: the workers are busy"),
    ],
)
def test_what_holds_refreshing_up_is_said(changes: dict[str, Any], words: str) -> None:
    assert words in status._refresh_line(REFRESH | changes)


def test_trouble_and_another_process_are_said() -> None:
    line = status._upkeep_line(UPKEEP | {"active": False, "trouble": "room: no space"})
    assert "another process" in line
    assert "trouble: room: no space" in line


def test_nothing_is_guessed_where_nothing_runs(tmp_path: Path) -> None:
    found = status.collect(load((), tmp_path, {}))
    assert (found["rungs"], found["upkeep"], found["refresh"], found["memory"]) == (None, None, None, None)
    assert "nothing runs here; start it with: kvloop up" in shown(found)
