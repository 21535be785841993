"""`kvloop memory` on a folder with chunks and records in it, and on one where there is nothing."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from loop import memory
from loop.config import load
from loop.supervisor import only_one
from memory.kv.fidelity import FidelityRecord, FidelityRecords
from memory.kv.settings import KVSettings
from memory.kv.store import KVStore
from tests.loop.test_cli import Kvloop
from tests.memory.kv.common import identity, kv_of, prompt

BASE = "ab" * 32
TOKENS = 70


@pytest.fixture
def kvloop(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kvloop:
    return Kvloop(tmp_path / "home", capsys, monkeypatch)


@pytest.fixture
def filled(kvloop: Kvloop) -> Kvloop:
    """A home whose KV memory holds one sequence of a version of the base."""
    config = load(("worker.kv.chunk_tokens=32",), kvloop.home, {})
    assert config.worker.kv_folder is not None
    of = identity(weights_id=f"{BASE}+{'cd' * 32}")
    ids = prompt(TOKENS)
    with KVStore(config.worker.kv.model_copy(update={"min_tokens": 4}), config.worker.kv_folder) as store:
        store.save(of, ids, kv_of(ids, of), owner="session 1")
        assert store.flush(30)
    return kvloop


def measured(kvloop: Kvloop, codec: Any, kl: float, size: float = 1000.0) -> None:
    record = FidelityRecord(BASE, codec, kl, 4 * kl, 0.97, 20_000, 0.0016, size, 23_040 / size, 0.0)
    FidelityRecords(kvloop.home / "kv" / "fidelity").put(record)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*.kv")}


def test_the_report_tells_what_is_stored_without_anything_running(filled: Kvloop) -> None:
    before = files(filled.home / "kv")
    found = filled("memory", "report", "--json").json
    assert found["folder"] == str(filled.home / "kv")
    (holding,) = found["holdings"]
    (rung,) = found["rungs"]
    assert (holding["tokens"], rung["tokens"], rung["fidelity"], rung["chunks"]) == (TOKENS, TOKENS, "exact", 3)
    assert rung["ratio"] == pytest.approx(holding["raw_bytes"] / holding["bytes"])
    assert holding["weights_id_base"] == BASE
    assert found["tiers"]["disk"]["bytes"] == holding["bytes"] == sum(map(len, before.values()))
    assert "remote" not in found["tiers"]
    # Settings of this command alone evict nothing.
    small = filled("memory", "report", "--json", before=("--set", "worker.kv.disk_bytes=1")).json
    assert (small["rungs"], small["tiers"]["disk"]["budget"]) == (found["rungs"], 1)
    assert files(filled.home / "kv") == before
    shown = filled("memory", "report").out
    assert "exact" in shown
    assert "kvloop memory measure" in shown


def test_records_are_told_with_whether_the_ladder_uses_them(filled: Kvloop, tmp_path: Path) -> None:
    measured(filled, "exact", 0.0, 16_000)
    measured(filled, "int8", 0.0018, 11_700)
    measured(filled, "int4", 0.9, 6_300)
    found = filled("memory", "report", "--json", "--picture", str(tmp_path / "ladder.svg")).json
    assert [(each["codec"], each["trusted"], each["max_kl"]) for each in found["records"]] == [
        ("exact", True, None),
        ("int8", True, KVSettings().int8_max_kl),
        ("int4", False, KVSettings().int4_max_kl),
    ]
    assert "int4" in (tmp_path / "ladder.svg").read_text()
    before = ("--set", "worker.kv.int4_max_kl=1.0")
    assert filled("memory", "report", "--json", before=before).json["records"][2]["trusted"] is True
    shown = filled("memory", "report").out
    (line,) = [line for line in shown.splitlines() if line.strip().startswith("int4")]
    assert ("6,300" in line, line.rstrip().endswith("no: > 0.006")) == (True, True)


def test_a_home_without_memory_is_reported_and_left_as_it_is(kvloop: Kvloop) -> None:
    found = kvloop("memory", "report", "--json").json
    assert (found["holdings"], found["rungs"], found["records"], found["tiers"]) == ([], [], [], {})
    assert "nothing is stored" in kvloop("memory", "report").out
    assert kvloop("memory", "clear", "--yes").out.startswith("deleted 0 chunks")
    assert not (kvloop.home / "kv").exists()


def test_a_picture_of_nothing_or_of_another_kind(filled: Kvloop, tmp_path: Path) -> None:
    assert "kvloop memory measure" in filled.refuses("memory", "report", "--picture", str(tmp_path / "a.png"))
    assert ".svg" in filled.refuses("memory", "report", "--picture", str(tmp_path / "a.gif"))


def test_a_keyring_that_others_can_read(filled: Kvloop) -> None:
    (filled.home / "keyring").chmod(0o644)
    assert "chmod 600" in filled.refuses("memory", "report")


def test_clear_deletes_chunks_and_keeps_what_was_measured(filled: Kvloop) -> None:
    measured(filled, "int8", 0.0018)
    before = files(filled.home / "kv")
    done = filled("memory", "clear", "--yes")
    assert done.out.startswith("deleted 3 chunks")
    assert len(before) == 3
    assert files(filled.home / "kv") == {}
    found = filled("memory", "report", "--json").json
    assert (found["rungs"], [each["codec"] for each in found["records"]]) == ([], ["int8"])


def test_clear_asks_first(filled: Kvloop, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(filled.home / "kv")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert filled("memory", "clear").code == 1
    assert files(filled.home / "kv") == before


def test_clear_leaves_a_running_memory_alone(filled: Kvloop) -> None:
    with only_one(filled.home):
        assert "stop it first" in filled.refuses("memory", "clear", "--yes")
    assert files(filled.home / "kv")


class _Worker(BaseHTTPRequestHandler):
    """Answers the one thing that `measure` asks."""

    status = 200

    def do_POST(self) -> None:
        assert self.path == "/v1/kv/measure"
        body = {"object": "kv.measured"} if self.status == 200 else {"error": {"message": "no compiler"}}
        data = json.dumps(body).encode()
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """The tests say what went wrong."""


@contextmanager
def worker(monkeypatch: pytest.MonkeyPatch, status: int) -> Iterator[None]:
    """A worker that seems to be the running install's."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Worker,), {"status": status}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(memory, "running_state", lambda home: {"worker": url, "gateway": url})
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def test_measuring_is_the_running_workers_work(filled: Kvloop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "kvloop up" in filled.refuses("memory", "measure")
    with worker(monkeypatch, 200):
        assert filled("memory", "measure", "--json").json == {"object": "kv.measured"}
        assert "exact" in filled("memory", "measure").out
    with worker(monkeypatch, 500):
        assert "no compiler" in filled.refuses("memory", "measure")
    assert "did not answer" in _refused_by_nobody(filled, monkeypatch)


def _refused_by_nobody(kvloop: Kvloop, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(memory, "running_state", lambda home: {"worker": "http://127.0.0.1:9"})
    return kvloop.refuses("memory", "measure")
