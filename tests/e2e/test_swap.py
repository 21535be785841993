"""The served version changes under traffic: nothing fails, nothing is mixed, and no KV crosses from one to another."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from loop.config import Config, load
from loop.demo.api import Api
from loop.demo.resume import Worker
from loop.demo.traffic import Traffic
from loop.follower import serving_name
from loop.jobs import promote, rollback
from loop.status import collect
from memory.journal import Journal
from pipelines.registry import CHAMPION, Registry
from tests.e2e.adapters import make_adapter, register, rewrite_manifest
from tests.running import Running

# MLflow and what it imports warn about themselves.
pytestmark = pytest.mark.filterwarnings("default")

LONG = "Some notes that are asked about again and again. " * 80
QUESTIONS = ("What is a lantern?", "Who repairs clocks?", "Where does the river end?", "When does the shop open?")
FOLLOW_SECONDS = 60.0
CHUNK_TOKENS = 256


@dataclass
class Install:
    """A running kvloop on a tiny model, with versions 1 and 2 registered, and 3 that lies about itself."""

    running: Running
    config: Config
    registry: Registry
    api: Api
    worker: Worker

    def reopen(self, *settings: str) -> None:
        """The same home with other settings."""
        self.running.stop()
        self.api.close()
        self.running = Running(self.config.home, self.running.model, *settings)
        self.running.start()
        self.api = Api(self.running.url)
        self.worker = Worker(self.config.home, f"http://127.0.0.1:{self.running.worker_port}")

    def name(self, version: str) -> str:
        return serving_name(version, self.registry.version_path(version))

    def ask(self, text: str = LONG) -> openai.types.chat.ChatCompletion:
        """Asks with a prompt of its own from the first chunk on, so that only the same prompt can be a hit."""
        with self.running.client() as client:
            return client.chat.completions.create(
                model="kvloop",
                messages=[{"role": "system", "content": text}, {"role": "user", "content": "Well?"}],
                max_tokens=4,
                temperature=0,
            )

    def reused(self) -> tuple[str, int]:
        """Who answers the long prompt, and how many of its tokens were reused, checked against the worker's count."""
        before = self.worker.computed_tokens()
        reply = self.ask()
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        cached = reply.usage.prompt_tokens_details.cached_tokens or 0
        assert self.worker.computed_tokens() - before == reply.usage.prompt_tokens - cached
        spans = (reply.usage.model_extra or {})["kvloop"]["spans"]
        assert len({span["weights_id"] for span in spans}) == 1
        return reply.model, cached

    def expect_reuse(self, name: str) -> None:
        """The long prompt is answered by `name` from KV that was there already."""
        model, cached = self.reused()
        assert model == name
        assert cached >= CHUNK_TOKENS

    def move_under_traffic(self, move: Callable[[], object], name: str) -> float:
        """Moves the alias while clients ask; checks every answer; returns seconds until the new version's first."""
        before = self.ask("Who are you?").model
        traffic = Traffic(self.api, QUESTIONS, clients=3, max_tokens=6)
        traffic.start()
        try:
            traffic.wait_for(before, 6, FOLLOW_SECONDS)
            move()
            moved = time.time()
            traffic.wait_for(name, 0, FOLLOW_SECONDS)
            after = time.time()
            traffic.wait_for(name, 20, FOLLOW_SECONDS)
        finally:
            report = traffic.stop()
        assert report.failures == []
        assert report.mixed == 0
        assert all(len(answer.fingerprints) == 1 for answer in report.answers)
        assert {answer.models for answer in report.answers} == {frozenset({before}), frozenset({name})}
        weights = {(*answer.models, *answer.fingerprints) for answer in report.answers}
        assert len(weights) == 2, "a version's name stands for one set of weights"
        late = [answer for answer in report.answers if before in answer.models and answer.first_token_at > after + 5]
        assert late == [], "the old version went on answering"
        first = report.first_token_of(name)
        assert first is not None
        return max(0.0, first - moved)

    def moves(self) -> list[tuple[str, str, str | None, str, str]]:
        """The ledger, oldest first."""
        journal = Journal.open(self.config.journal.url, self.config.journal)
        try:
            entries = journal.list_promotions()
        finally:
            journal.close()
        return [(e.who, e.action, e.from_version, e.to_version, e.reason) for e in reversed(entries)]


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory, deep_model_dir: Path) -> Iterator[Install]:
    folder = tmp_path_factory.mktemp("swap")
    config = load((), folder / "home", {})
    registry = Registry(config.registry)
    for seed in (1, 2):
        adapter = make_adapter(folder / f"adapter-{seed}", deep_model_dir, seed)
        register(registry, adapter, f"run_{seed}")
    liar = shutil.copytree(folder / "adapter-2", folder / "adapter-3")
    other = json.loads((folder / "adapter-1" / "manifest.json").read_text())
    rewrite_manifest(liar, fingerprint=other["fingerprint"])
    register(registry, liar, "run_3")
    # Without refreshes: what is reused after a swap can then only come from turns.
    running = Running(config.home, deep_model_dir, "gateway.refresh=false")
    running.start()
    api = Api(running.url)
    worker = Worker(config.home, f"http://127.0.0.1:{running.worker_port}")
    install = Install(running, config, registry, api, worker)
    yield install
    install.api.close()
    install.running.stop()


def test_swaps_under_traffic(install: Install) -> None:
    one, two = install.name("1"), install.name("2")
    assert install.reused() == ("base", 0)
    install.expect_reuse("base")

    seconds = [install.move_under_traffic(lambda: promote(install.config, 1, "first"), one)]
    assert install.reused() == (one, 0), "KV of the base was used under version 1"
    install.expect_reuse(one)

    seconds.append(install.move_under_traffic(lambda: promote(install.config, 2, "second"), two))
    assert install.reused() == (two, 0), "KV of version 1 was used under version 2"
    install.expect_reuse(two)

    seconds.append(install.move_under_traffic(lambda: rollback(install.config, "worse"), one))
    install.expect_reuse(one)  # what version 1 computed is good again

    def by_mlflow() -> None:
        from mlflow import MlflowClient

        uri = install.registry.tracking_uri
        MlflowClient(tracking_uri=uri, registry_uri=uri).set_registered_model_alias("kvloop", CHAMPION, "2")

    seconds.append(install.move_under_traffic(by_mlflow, two))
    install.expect_reuse(two)

    seconds.append(install.move_under_traffic(lambda: install.registry.delete_alias(CHAMPION), "base"))
    install.expect_reuse("base")

    assert sorted(seconds)[len(seconds) // 2] <= 3, seconds  # the median: one may meet a busy machine
    moved = "the champion alias was moved in MLflow"
    assert install.moves() == [
        ("kvloop", "promote", "base", "1", "first"),
        ("kvloop", "follow", "base", one, "first"),
        ("kvloop", "promote", "1", "2", "second"),
        ("kvloop", "follow", one, two, "second"),
        ("kvloop", "rollback", "2", "1", "worse"),
        ("kvloop", "follow", two, one, "worse"),
        ("mlflow", "follow", one, two, moved),
        ("mlflow", "follow", two, "base", moved),
    ]
    assert collect(install.config)["serving"]["name"] == "base"


def test_a_session_goes_on_under_the_new_weights_without_the_old_kv(install: Install) -> None:
    install.reopen()
    _wait_until_serving(install, "base")
    first = install.api.ask(LONG + "The session begins.", max_tokens=4)
    before, computed = set(first.models), install.worker.computed_tokens()
    install.registry.set_alias(CHAMPION, "1")
    _wait_until_serving(install, install.name("1"))
    # It was in use, so it stays on its version until its KV is there under the new weights.
    _wait_until_refreshed(install, first.session_id, install.name("1"))
    assert install.worker.computed_tokens() - computed >= first.prompt_tokens, "the refresh computed nothing"
    second = install.api.ask("And now?", session_id=first.session_id, max_tokens=4)
    assert set(second.models) == {install.name("1")} != before
    assert second.prompt_tokens > first.prompt_tokens
    assert second.cached_tokens >= first.prompt_tokens, "the session was refreshed before it returned"
    assert {span["weights_id"] for span in second.extras["spans"]} == {second.extras["weights_id"]}
    third = install.api.ask("And then?", session_id=first.session_id, max_tokens=4)
    assert third.cached_tokens >= CHUNK_TOKENS


def test_an_adapter_that_lies_is_refused_and_the_old_one_goes_on(install: Install) -> None:
    install.registry.set_alias(CHAMPION, "1")
    _wait_until_serving(install, install.name("1"))
    moves = install.moves()
    log = install.running.home / "run" / "follower.log"
    traffic = Traffic(install.api, QUESTIONS, clients=2, max_tokens=4)
    traffic.start()
    try:
        install.registry.set_alias(CHAMPION, "3")
        deadline = time.monotonic() + FOLLOW_SECONDS
        while install.name("3") not in log.read_text():
            assert time.monotonic() < deadline, "the version that lies was never tried"
            time.sleep(0.05)
        traffic.wait_for(install.name("1"), 10, FOLLOW_SECONDS)
    finally:
        report = traffic.stop()
    assert report.failures == []
    assert {answer.models for answer in report.answers} == {frozenset({install.name("1")})}
    (refusal,) = [line for line in log.read_text().splitlines() if install.name("3") in line]
    assert "refused" in refusal
    assert "fingerprint" in refusal
    assert install.moves() == moves
    assert collect(install.config)["serving"]["name"] == install.name("1")

    install.registry.set_alias(CHAMPION, "2")
    _wait_until_serving(install, install.name("2"))


def test_a_home_whose_champion_is_an_adapter_can_be_moved(install: Install, deep_model_dir: Path) -> None:
    """Last in this file: it leaves the install elsewhere."""
    install.registry.set_alias(CHAMPION, "2")
    _wait_until_serving(install, install.name("2"))
    moves = install.moves()
    install.running.stop()
    moved = install.running.home.with_name("moved")
    install.running.home.rename(moved)
    install.config = load((), moved, {})
    install.registry = Registry(install.config.registry)
    install.running = Running(moved, deep_model_dir)
    install.running.start()
    _wait_until_serving(install, install.name("2"))
    install.registry.set_alias(CHAMPION, "1")
    _wait_until_serving(install, install.name("1"))
    assert install.moves()[: len(moves)] == moves


def _wait_until_serving(install: Install, name: str) -> None:
    deadline = time.monotonic() + FOLLOW_SECONDS
    while _answers(install) != name:
        assert time.monotonic() < deadline, f"{name} does not serve"
        time.sleep(0.05)


def _wait_until_refreshed(install: Install, session_id: str, name: str) -> None:
    deadline = time.monotonic() + FOLLOW_SECONDS
    with install.running.client() as client:
        while client.get(f"/sessions/{session_id}", cast_to=dict[str, object])["version"] != name:
            assert time.monotonic() < deadline, f"the session is not at {name}"
            time.sleep(0.05)


def _answers(install: Install) -> str:
    try:
        return install.ask("Who are you?").model
    except openai.InternalServerError:
        return "nobody yet"
