"""Serving follows the alias, whoever moved it: a real registry and journal, and a gateway of two endpoints."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from loop.config import Config, load
from loop.follower import Follower
from memory.journal import Journal
from pipelines.promotion import Promotions
from pipelines.registry import CHAMPION, Registry, RegistryError
from tests.ports import free_port

# MLflow and what it imports warn about themselves.
pytestmark = pytest.mark.filterwarnings("default")

TOKEN = "token-of-the-test"


class FakeGateway(ThreadingHTTPServer):
    """Keeps what the gateway keeps: who serves, and a line in the ledger for each change."""

    def __init__(self, journal: Journal, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.journal = journal
        self.serving = "base"
        self.paths: dict[str, str | None] = {}
        self.refused: dict[str, str] = {}
        self.broken = False
        self.asked: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def activate(self, wanted: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body of the answer."""
        self.asked.append(wanted)
        if self.broken:
            return 503, {"error": {"message": "no worker answers"}}
        if wanted["name"] in self.refused:
            return 409, {"error": {"message": self.refused[wanted["name"]]}}
        self.journal.add_promotion(
            wanted["who"],
            wanted["action"],
            self.serving,
            wanted["name"],
            wanted["reason"],
            report=wanted.get("report"),
            seconds=0.001,
        )
        self.serving = wanted["name"]
        self.paths[wanted["name"]] = wanted["path"]
        return 200, {"name": self.serving}


class _Handler(BaseHTTPRequestHandler):
    server: FakeGateway

    def do_GET(self) -> None:
        known = self.path == "/internal/versions" and self._trusted()
        told = {
            "serving": self.server.serving,
            "versions": [{"name": n, "path": p} for n, p in self.server.paths.items()],
        }
        self._answer(*((200, told) if known else (404, {})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = self.path == "/internal/versions/activate" and self._trusted()
        self._answer(*(self.server.activate(body) if known else (404, {})))

    def _trusted(self) -> bool:
        return self.headers["Authorization"] == f"Bearer {TOKEN}"

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """The tests say what went wrong."""


@dataclass
class World:
    """One install: a registry with three versions, a journal, and a gateway to talk to."""

    config: Config
    registry: Registry
    journal: Journal
    gateway: FakeGateway
    follower: Follower
    names: dict[str, str] = field(default_factory=lambda: {"1": "v1-11111111", "2": "v2-22222222", "3": "v3-33333333"})

    @property
    def promotions(self) -> Promotions:
        return Promotions(self.journal, self.registry)

    def follows(self) -> list[tuple[str, str | None, str, str]]:
        """(who, from, to, why) of each time serving followed, oldest first."""
        entries = [entry for entry in self.journal.list_promotions() if entry.action == "follow"]
        return [(entry.who, entry.from_version, entry.to_version, entry.reason) for entry in reversed(entries)]


@pytest.fixture
def world(home_with_versions: Path) -> Iterator[World]:
    config = load((), home_with_versions, {})
    journal = Journal.open(config.journal.url, config.journal)
    registry = Registry(config.registry)
    gateway = FakeGateway(journal)
    follower = Follower(registry, journal, gateway.url, TOKEN)
    yield World(config, registry, journal, gateway, follower)
    follower.close()
    gateway.close()
    journal.close()


def test_without_an_alias_the_base_serves_and_nothing_is_asked(world: World) -> None:
    assert world.follower.step() is None
    assert world.gateway.asked == []


def test_serving_follows_promotions_and_rollbacks(world: World) -> None:
    one, two = world.names["1"], world.names["2"]
    world.promotions.promote("1", "gate", "better by 0.4", report="/reports/1")
    assert world.follower.step() == one
    asked = world.gateway.asked[0]
    assert (asked["name"], asked["version"], asked["report"]) == (one, "1", "/reports/1")
    assert Path(asked["path"]) == world.registry.version_path("1")
    world.promotions.promote("2", "kvloop", "by hand")
    assert world.follower.step() == two
    world.promotions.rollback("kvloop", "it rambles")
    assert world.follower.step() == one
    assert world.follower.step() is None
    assert world.follows() == [
        ("gate", "base", one, "better by 0.4"),
        ("kvloop", one, two, "by hand"),
        ("kvloop", two, one, "it rambles"),
    ]
    assert world.journal.list_promotions(to_version=one)[-1].report == "/reports/1"


def test_what_stale_kv_costs_is_told_only_of_the_move_it_was_measured_for(world: World) -> None:
    for version in ("2", "1", "2", "3"):
        world.promotions.promote(version, "kvloop", "by hand")
        world.follower.step()
    world.registry.delete_alias(CHAMPION)
    world.follower.step()
    asked = [(asked["version"], asked.get("stale_kl")) for asked in world.gateway.asked]
    assert asked == [("2", None), ("1", None), ("2", 0.004), ("3", None), (None, None)]


def test_the_first_version_rolls_back_to_the_base(world: World) -> None:
    world.promotions.promote("1", "kvloop", "try")
    world.follower.step()
    world.promotions.rollback("kvloop", "no")
    assert world.follower.step() == "base"
    asked = world.gateway.asked[-1]
    assert (asked["name"], asked["path"], asked["version"]) == ("base", None, None)
    assert world.follows()[-1] == ("kvloop", world.names["1"], "base", "no")


def test_moves_by_mlflows_own_client_are_followed_and_told_apart(world: World) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=world.registry.tracking_uri, registry_uri=world.registry.tracking_uri)
    why = "the champion alias was moved in MLflow"
    one, two = world.names["1"], world.names["2"]
    client.set_registered_model_alias("kvloop", CHAMPION, "1")
    assert world.follower.step() == one
    world.promotions.promote("2", "kvloop", "by hand")
    assert world.follower.step() == two
    client.set_registered_model_alias("kvloop", CHAMPION, "1")
    assert world.follower.step() == one
    client.set_registered_model_alias("kvloop", CHAMPION, "2")
    assert world.follower.step() == two
    client.delete_registered_model_alias("kvloop", CHAMPION)
    assert world.follower.step() == "base"
    assert world.follows() == [
        ("mlflow", "base", one, why),
        ("kvloop", one, two, "by hand"),
        ("mlflow", two, one, why),
        ("mlflow", one, two, why),
        ("mlflow", two, "base", why),
    ]


def test_rollback_after_moves_made_in_mlflow_returns_to_what_served(world: World) -> None:
    world.promotions.promote("1", "kvloop", "by hand")
    world.follower.step()
    world.registry.set_alias(CHAMPION, "3")  # as MLflow's user interface does
    world.follower.step()
    world.promotions.rollback("kvloop", "it rambles")
    assert world.follower.step() == world.names["1"]
    world.registry.set_alias(CHAMPION, "2")
    world.follower.step()
    world.promotions.rollback("kvloop", "so does this")
    assert world.follower.step() == world.names["1"]


def test_only_the_last_of_several_quick_moves_is_followed(world: World) -> None:
    for version in ("1", "2", "3"):
        world.promotions.promote(version, "kvloop", f"try {version}")
    assert world.follower.step() == world.names["3"]
    assert world.follows() == [("kvloop", "base", world.names["3"], "try 3")]


def test_a_move_made_while_the_one_before_is_loading_keeps_its_author(world: World) -> None:
    world.promotions.promote("1", "kvloop", "first")
    began = time.monotonic()
    time.sleep(0.05)
    world.promotions.promote("2", "kvloop", "second")  # written before serving has followed to the first
    world.journal.add_promotion("kvloop", "follow", "base", world.names["1"], "first", seconds=time.monotonic() - began)
    world.gateway.serving = world.names["1"]
    assert world.follower.step() == world.names["2"]
    assert world.follows()[-1] == ("kvloop", world.names["1"], world.names["2"], "second")


def test_a_refusal_is_said_once_and_tried_again_later(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "kvloop.follower")
    one, two = world.names["1"], world.names["2"]
    world.promotions.promote("1", "kvloop", "good")
    world.follower.step()
    world.gateway.refused[two] = "its fingerprint does not hold"
    world.promotions.promote("2", "kvloop", "bad")
    for _ in range(5):
        assert world.follower.step() is None
    assert [asked["name"] for asked in world.gateway.asked] == [one, two]
    assert world.gateway.serving == one
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert two in line
    assert "its fingerprint does not hold" in line

    world.gateway.refused.clear()
    monkeypatch.setattr("loop.follower.REFUSED_RETRY_SECONDS", 0.0)
    assert world.follower.step() == two
    assert world.follows()[-1] == ("kvloop", one, two, "bad")


def test_a_refusal_does_not_stand_in_the_way_of_another_version(world: World) -> None:
    world.gateway.refused[world.names["1"]] = "no"
    world.promotions.promote("1", "kvloop", "bad")
    assert world.follower.step() is None
    world.promotions.promote("2", "kvloop", "good")
    assert world.follower.step() == world.names["2"]
    world.gateway.refused.clear()
    world.promotions.promote("1", "kvloop", "mended")
    assert world.follower.step() == world.names["1"]


def test_asking_again_by_hand_after_a_rollback_is_not_held_back_by_the_refusal(world: World) -> None:
    world.gateway.refused[world.names["1"]] = "no"
    world.promotions.promote("1", "kvloop", "bad")
    world.follower.step()
    world.promotions.rollback("kvloop", "it was refused")
    assert world.follower.step() is None
    world.gateway.refused.clear()
    world.promotions.promote("1", "kvloop", "mended")
    assert world.follower.step() == world.names["1"]


def test_a_gateway_without_worker_is_an_error_and_no_refusal(world: World) -> None:
    world.promotions.promote("1", "kvloop", "good")
    world.gateway.broken = True
    for _ in range(2):
        with pytest.raises(httpx.HTTPStatusError, match="503"):
            world.follower.step()
    world.gateway.broken = False
    assert world.follower.step() == world.names["1"]


def test_a_wrong_admin_token_is_an_error(world: World) -> None:
    follower = Follower(world.registry, world.journal, world.gateway.url, "wrong")
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        follower.step()
    follower.close()


@pytest.mark.parametrize("content", ["", "[]", '{"adapter_digest": null}', "{}", '{"adapter_digest"'])
def test_a_version_without_a_readable_manifest_is_an_error_that_names_it(world: World, content: str) -> None:
    manifest = world.registry.version_path("3") / "manifest.json"
    good = manifest.read_text()
    manifest.write_text(content)
    world.registry.set_alias(CHAMPION, "3")
    try:
        with pytest.raises(RegistryError, match="version 3 has no readable"):
            world.follower.step()
    finally:
        manifest.write_text(good)
    assert world.follower.step() == world.names["3"]


def test_the_process_keeps_trying_while_the_gateway_is_away(world: World, tmp_path: Path) -> None:
    port = free_port()
    settings = {"home": tmp_path, "follow_seconds": 0.1}
    gateway_settings = world.config.gateway.model_copy(update={"port": port})
    config = world.config.model_copy(update={**settings, "gateway": gateway_settings})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "admin-token").write_text(f"{TOKEN}\n")
    world.promotions.promote("1", "kvloop", "by hand")
    log = tmp_path / "follower.log"
    command = [sys.executable, "-m", "loop.follower", "--config-file", str(tmp_path / "config.json")]
    with log.open("wb") as output, subprocess.Popen(command, stderr=output, stdout=output) as process:
        try:
            _wait(lambda: "cannot follow now" in log.read_text(), process)
            time.sleep(0.5)  # several more looks, of which nothing is said
            gateway = FakeGateway(world.journal, port)
            try:
                _wait(lambda: gateway.serving == world.names["1"], process)
                world.promotions.promote("2", "kvloop", "by hand")
                _wait(lambda: gateway.serving == world.names["2"], process)
            finally:
                gateway.close()
            _wait(lambda: log.read_text().count("cannot follow now") == 2, process)
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    assert "Traceback" not in log.read_text()


def _wait(condition: Any, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the follower ended"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)
