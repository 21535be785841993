"""KV memory through the real processes: named memory survives a restart, sessions survive a promotion, and what is
deleted is in no file of the home any more."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from loop.config import Config, load
from loop.demo.api import Answer, Api
from loop.demo.resume import Worker
from loop.follower import serving_name
from loop.jobs import promote
from pipelines.registry import Registry
from serve.gateway.text import TextCodec
from tests.e2e.adapters import make_adapter, register
from tests.e2e.conftest import LAYERS
from tests.running import Running

# MLflow and what it imports warn about themselves.
pytestmark = pytest.mark.filterwarnings("default")

HANDBOOK = (
    "The night watch of Quimbelmoor keeps the brass key under the third lamp, and counts the boats at dawn. " * 30
)
SECRET = "Zyrkowald hid eleven violet lanterns behind the Frobenmuehle granary. "
PATIENCE = 60.0
Json = dict[str, Any]
CHUNK = 64
# what is restored must not depend on how busy the machine is
SETTINGS = (f"worker.kv.chunk_tokens={CHUNK}", "worker.kv.upkeep_seconds=0.5", 'worker.kv.restore="always"')
QUESTION = "Who keeps the key, and who counts the boats? " * 12


@dataclass
class Install:
    """A running kvloop; version 1 starts where training would, at layer 4 of 10.

    The first test makes the memory and the `sessions`: two that attach it, and one that tells a secret.
    """

    running: Running
    config: Config
    registry: Registry
    codec: TextCodec
    memory_id: str = ""
    sessions: list[str] = field(default_factory=list)

    def post(self, path: str, body: Json) -> Json:
        return _told(httpx.post(f"{self.running.url}/v1{path}", json=body, timeout=60))

    def delete(self, path: str) -> Json:
        return _told(httpx.delete(f"{self.running.url}/v1{path}", timeout=60))

    def ask(self, text: str, session_id: str | None = None) -> Answer:
        """One turn, greedy and short."""
        api = Api(self.running.url)
        try:
            return api.ask(text, session_id=session_id, max_tokens=8)
        finally:
            api.close()

    @property
    def worker(self) -> Worker:
        return Worker(self.running.home, f"http://127.0.0.1:{self.running.worker_port}")

    def restart(self, *settings: str) -> None:
        """Stops everything and starts it again, with other settings."""
        self.worker.wait_until_written()
        self.running.stop()
        self.running = Running(self.running.home, self.running.model, *SETTINGS, *settings)
        self.running.start()

    def serving(self) -> str:
        """Who answers a session that is new."""
        return next(iter(self.ask("Who is it?").models))

    def refresh(self) -> Json:
        """What `kvloop status` says about refreshing."""
        found: Json = self.running.json("status")["refresh"]
        return found

    def files_with(self, traces: Sequence[bytes]) -> list[str]:
        """Files of the home that hold any of these bytes."""
        files = [path for path in self.running.home.rglob("*") if path.is_file()]
        return sorted(path.name for path in files if any(trace in path.read_bytes() for trace in traces))

    def traces(self, text: str) -> list[bytes]:
        """How a text may lie in a file: its rare words, and the ids of its tokens as numbers of 2, 4 or 8 bytes."""
        ids = self.codec.encode_plain(text)[2:10]
        words = [word.strip(",.") for word in text.split() if len(word) > 9]
        return [word.encode() for word in words] + [np.array(ids, kind).tobytes() for kind in ("<u2", "<u4", "<u8")]


def _told(answer: httpx.Response) -> Json:
    assert answer.is_success, answer.text
    told: Json = answer.json()
    return told


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory, deep_model_dir: Path) -> Iterator[Install]:
    folder = tmp_path_factory.mktemp("memory")
    config = load((), folder / "home", {})
    registry = Registry(config.registry)
    register(
        registry,
        make_adapter(folder / "adapter-1", deep_model_dir, 1, layers_to_transform=[*range(4, LAYERS)]),
        "run_1",
    )
    running = Running(config.home, deep_model_dir, *SETTINGS, "gateway.refresh=false", "gateway.pin_seconds=0")
    running.start()
    install = Install(running, config, registry, TextCodec(deep_model_dir))
    yield install
    install.running.stop()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_a_named_memory_is_computed_once_and_restored_after_a_restart(install: Install) -> None:
    memory = install.post("/memories", {"name": "handbook", "text": HANDBOOK})
    install.memory_id = memory["id"]
    install.sessions = [install.post("/sessions", {"memory_ids": [memory["id"]]})["id"] for _ in range(2)]
    first, second = (install.ask(QUESTION, session) for session in install.sessions)
    assert second.prompt_tokens == first.prompt_tokens > memory["tokens"] > 500
    assert second.cached_tokens >= memory["tokens"] // CHUNK * CHUNK
    install.sessions.append(install.ask(SECRET).session_id)

    install.restart("gateway.refresh=false", "gateway.pin_seconds=0")
    again = install.ask("And at dusk?", install.sessions[0])
    assert again.cached_tokens >= 0.9 * first.prompt_tokens
    assert again.extras["restored_tokens"] >= CHUNK  # the gateway fetches what is the memory's own ahead of the turn
    assert again.extras["fidelity"] == "exact"


def test_after_a_promotion_only_the_trained_layers_are_computed(install: Install) -> None:
    version = serving_name("1", install.registry.version_path("1"))
    promote(install.config, 1, "better")
    wait_until(lambda: install.serving() == version, f"{version} does not serve")
    answer = install.ask("And at noon?", install.sessions[0])
    lifted = answer.extras["lifted_tokens"]
    assert answer.models == {version}
    assert lifted >= CHUNK
    # What is the memory's own the gateway had computed ahead of the turn.
    assert lifted + answer.cached_tokens >= 0.9 * answer.prompt_tokens
    assert {"lifted", "computed", "generated"} <= {span["source"] for span in answer.extras["spans"]}
    assert {span["weights_id"] for span in answer.extras["spans"]} == {answer.extras["weights_id"]}


def test_refreshed_sessions_find_their_memory_under_the_new_version(install: Install) -> None:
    install.restart()
    wait_until(lambda: (install.refresh() or {}).get("done", 0) >= 2, f"not refreshed: {install.refresh()}")
    told = install.refresh()
    assert (told["waiting"], told["failed"], told["current"]) == (0, 0, None)
    assert told["tokens_done"] > 500
    status, report = install.running.json("status"), install.running.json("memory", "report")
    assert [rung["fidelity"] for rung in status["rungs"]] == ["exact"]
    assert {holding["band"] for holding in report["holdings"]} == {"0-4", "hidden-4", f"4-{LAYERS}"}
    assert stat.S_IMODE((install.running.home / "keyring").stat().st_mode) == 0o600
    assert status["upkeep"]["active"] is True
    shown = install.running.run("status").stdout
    assert all(f"\n{part} " in shown for part in ("memory", "rungs", "upkeep", "refresh"))
    answer = install.ask("And at noon?", install.sessions[1])
    assert answer.models == {serving_name("1", install.registry.version_path("1"))}
    assert answer.cached_tokens >= 0.9 * answer.prompt_tokens
    assert answer.extras["lifted_tokens"] == 0


def test_what_is_deleted_is_in_no_file_any_more(install: Install) -> None:
    install.worker.wait_until_written()
    memory = install.running.home / "kv"
    words, secret = install.traces(HANDBOOK), install.traces(SECRET)
    assert "journal.db" in install.files_with(words)
    assert "journal.db" in install.files_with(secret)
    assert install.files_with([secret[-2]])  # as 32-bit numbers
    assert not any(trace in path.read_bytes() for path in memory.rglob("*") if path.is_file()
                   for trace in (*words, *secret))  # fmt: skip
    files = len(list(memory.rglob("*.kv")))

    receipt = install.delete(f"/sessions/{install.sessions[2]}")["receipt"]
    assert receipt["sessions"] == [install.sessions[2]]
    gone = install.delete(f"/memories/{install.memory_id}")["receipt"]
    assert sorted(gone["sessions"]) == sorted(install.sessions[:2])
    assert len(list(memory.rglob("*.kv"))) < files
    assert install.files_with([*words, *secret]) == []
    install.running.stop()  # what was in memory is written by now
    assert install.files_with([*words, *secret]) == []
