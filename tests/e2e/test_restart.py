"""The session that survives: kill -9 of everything, start again, here or from a moved home; the next turn restores."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from loop.demo.api import Answer, Api
from loop.demo.resume import Worker
from memory.journal import Journal
from tests.running import Running

NOTES = (
    "The third shelf holds lamps, the fourth holds clocks, and the fifth is kept for what nobody has named yet. " * 40
)
PROCESSES = ("worker", "gateway", "follower", "scheduler")
# what is restored must not depend on how busy the machine is
KV = ("worker.kv.chunk_tokens=64", 'worker.kv.restore="always"')


@dataclass
class Talk:
    """One session in one install, which may be killed, moved and started again between two turns."""

    running: Running
    session_id: str | None = None
    told: int = 0
    """Prompt tokens of the newest turn: what the next turn's prompt begins with."""

    def turn(self, text: str) -> Answer:
        """Says `text`; what the API says about reuse must agree with the worker's own count of what it computed."""
        api = Api(self.running.url)
        try:
            worker = self.worker
            before = worker.computed_tokens()
            answer = api.ask(text, session_id=self.session_id, max_tokens=12)
            computed = worker.computed_tokens() - before
        finally:
            api.close()
        assert answer.prompt_tokens - answer.cached_tokens == computed == answer.extras["computed_tokens"]
        assert self.session_id in (None, answer.session_id)
        assert answer.prompt_tokens > self.told
        self.session_id, self.told = answer.session_id, answer.prompt_tokens
        return answer

    @property
    def worker(self) -> Worker:
        return Worker(self.running.home, f"http://127.0.0.1:{self.running.worker_port}")

    def stored(self) -> tuple[list[int], list[str]]:
        """The session's token ids and its replies, as the journal has them."""
        journal = Journal.open(f"sqlite:///{self.running.home / 'journal.db'}")
        try:
            assert self.session_id is not None
            head = journal.get_session("default", self.session_id).head_response
            assert head is not None
            replies = [str(response.output_message["content"]) for response in journal.chain(head)]
            return journal.session_token_ids(head), replies
        finally:
            journal.close()

    def kill_everything(self) -> None:
        """kill -9 of the supervisor and of each process that it started."""
        pids = [self.running.pid(name) for name in PROCESSES]
        processes = [psutil.Process(pid) for pid in pids if pid is not None]
        assert len(processes) == len(PROCESSES)
        self.running.kill("supervisor")
        for process in processes:
            if process.is_running():
                os.kill(process.pid, signal.SIGKILL)
        assert psutil.wait_procs(processes, timeout=30)[1] == []


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory, deep_model_dir: Path) -> Iterator[Talk]:
    running = Running(tmp_path_factory.mktemp("restart") / "home", deep_model_dir, *KV)
    running.start()
    talk = Talk(running)
    yield talk
    talk.running.stop()


def check_resumed(talk: Talk, before: tuple[list[int], list[str]], answer: Answer) -> None:
    """`answer` continues what `before` was, from KV on disk; only the tail and the new words were computed."""
    ids, replies = before
    assert answer.extras["restored_tokens"] >= 0.9 * len(ids)
    assert answer.cached_tokens >= answer.extras["restored_tokens"]
    sources = [(span["source"], span["start"], span["end"]) for span in answer.extras["spans"]]
    assert sources[0][:2] == ("disk", 0)
    assert sources[-1][0] == "generated"
    assert all(earlier[2] == later[1] for earlier, later in itertools.pairwise(sources))
    assert len({span["weights_id"] for span in answer.extras["spans"]}) == 1
    ids_after, replies_after = talk.stored()
    assert ids_after[: len(ids)] == ids
    assert len(ids_after) > len(ids)
    assert replies_after == [*replies, answer.text]


def test_after_kill_9_of_everything_the_next_turn_restores_from_disk(talk: Talk) -> None:
    cold = talk.turn(NOTES + "Can you remember this?")
    assert cold.prompt_tokens > 600
    assert cold.cached_tokens == 0
    talk.turn("What is on the third shelf?")
    talk.worker.wait_until_written()
    before = talk.stored()
    talk.kill_everything()
    assert talk.stored() == before
    talk.running.start()
    check_resumed(talk, before, talk.turn("And on the fourth?"))


def test_the_home_folder_can_be_moved(talk: Talk, deep_model_dir: Path, tmp_path: Path) -> None:
    if talk.session_id is None:
        talk.turn(NOTES)
    talk.worker.wait_until_written()
    before = talk.stored()
    talk.kill_everything()
    moved = tmp_path / "another place" / "home"
    moved.parent.mkdir()
    talk.running.home.rename(moved)
    talk.running = Running(moved, deep_model_dir, *KV)
    talk.running.start()
    check_resumed(talk, before, talk.turn("And on the fifth?"))
    with talk.running.client() as client:
        session = client.get(f"/sessions/{talk.session_id}", cast_to=dict[str, object])
    assert session["id"] == talk.session_id
