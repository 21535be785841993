"""The queue of refreshes: what is in it, in what order, and the compare-and-swap that ends a refresh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memory.journal import Journal, Refresh, VersionMove
from tests.memory.journal.conftest import turn

OLD, NEW = "a" * 64, "b" * 64


def _refresh(session: str, **more: Any) -> Refresh:
    values: dict[str, Any] = {
        "tenant": "acme", "session_id": session, "version": "v2", "weights_id": NEW, "reason": "promote",
        "live": False, "score": 1.0, "tokens": 10, "state": "waiting", "attempts": 0, "updated_at": 0.0,
    }  # fmt: skip
    return Refresh(**(values | more))


def _begun(journal: Journal, version: str | None = "v1", **extra: Any) -> str:
    session = journal.create_session("acme")
    move = None if version is None else VersionMove(was=None, now=version)
    journal.add_responses([turn(session.id, None, **extra)], move)
    return session.id


def test_those_in_use_go_first_then_by_score(journal: Journal) -> None:
    names = [_begun(journal) for _ in range(4)]
    wanted = [(False, 1.0), (False, 9.0), (True, 0.5), (True, 2.0)]
    journal.queue_refreshes(
        [_refresh(name, live=live, score=score) for name, (live, score) in zip(names, wanted, strict=True)]
    )
    order = []
    while (refresh := journal.next_refresh(NEW)) is not None:
        order.append(names.index(refresh.session_id))
        journal.end_refresh(refresh, "done", refresh.attempts + 1)
    assert order == [3, 2, 1, 0]
    counts = journal.count_refreshes(NEW)
    assert (counts.waiting, counts.done, counts.tokens_done, counts.tokens_waiting) == (0, 4, 40, 0)
    assert journal.count_refreshes(OLD).done == 0


def test_a_session_is_queued_once(journal: Journal) -> None:
    name = _begun(journal)
    journal.queue_refreshes([_refresh(name, weights_id=OLD, version="v1")])
    journal.queue_refreshes([_refresh(name)])
    assert journal.next_refresh(OLD) is None
    stored = journal.next_refresh(NEW)
    assert stored is not None
    assert replace(stored, updated_at=0.0) == _refresh(name)
    # What ends late says nothing of what was queued since.
    journal.end_refresh(_refresh(name, weights_id=OLD), "done", 1)
    assert journal.next_refresh(NEW) == stored


def test_what_is_asked_for_again_while_it_runs_waits_again(journal: Journal) -> None:
    """A turn over lossy KV that comes while an earlier one's climb runs: what it stored is not exact yet."""
    name = _begun(journal)
    journal.queue_refreshes([_refresh(name, reason="climb")])
    running = journal.next_refresh(NEW)
    assert running is not None
    journal.queue_refreshes([_refresh(name, reason="climb", tokens=20)])
    journal.end_refresh(running, "done", 1)
    again = journal.next_refresh(NEW)
    assert again is not None
    assert (again.tokens, again.attempts) == (20, 0)
    journal.end_refresh(again, "done", 1)
    assert journal.next_refresh(NEW) is None


def test_what_waits_for_other_weights_is_dropped(journal: Journal) -> None:
    old, new = _begun(journal), _begun(journal)
    journal.queue_refreshes([_refresh(old, weights_id=OLD), _refresh(new)])
    assert journal.drop_refreshes(NEW) == 1
    assert journal.next_refresh(OLD) is None
    assert journal.next_refresh(NEW) is not None


def test_a_deleted_session_leaves_the_queue(journal: Journal) -> None:
    name = _begun(journal)
    journal.queue_refreshes([_refresh(name)])
    journal.delete_session("acme", name)
    assert journal.next_refresh(NEW) is None
    assert journal.count_refreshes(NEW).waiting == 0


def test_a_flip_is_a_compare_and_swap(journal: Journal) -> None:
    name = _begun(journal)
    head = journal.get_session("acme", name).head_response
    assert head is not None
    assert not journal.flip_session("acme", name, head, "v0", "v2")
    assert not journal.flip_session("acme", name, "resp_other", "v1", "v2")
    assert not journal.flip_session("other", name, head, "v1", "v2")
    assert journal.get_session("acme", name).version == "v1"
    assert journal.flip_session("acme", name, head, "v1", "v2")
    assert journal.get_session("acme", name).version == "v2"
    assert not journal.flip_session("acme", name, head, "v1", "v2")


@pytest.mark.parametrize("was", [None, "v1"])
def test_a_turn_moves_a_session_unless_a_refresh_was_faster(journal: Journal, was: str | None) -> None:
    name = _begun(journal, was)
    head = journal.get_session("acme", name).head_response
    assert head is not None
    assert journal.flip_session("acme", name, head, was, "v2")
    # It began before the flip, on the version of then.
    reply = journal.add_responses([turn(name, head)], VersionMove(was=was, now="v1"))[0]
    assert journal.get_session("acme", name).version == "v2"
    journal.add_responses([turn(name, reply.id)], VersionMove(was="v2", now="v3"))
    assert journal.get_session("acme", name).version == "v3"


def test_sleepers_are_those_elsewhere(journal: Journal) -> None:
    at_old, at_new, nowhere = (_begun(journal, version) for version in ("v1", "v2", None))
    journal.create_session("acme")  # nothing was said in it
    gone = _begun(journal)
    journal.delete_session("acme", gone)
    longer = turn(at_old, journal.get_session("acme", at_old).head_response)
    journal.add_response(replace(longer, cached_tokens=100, computed_tokens=20, generated_tokens=3))
    found = journal.sleepers("v2", 10, 0.0)
    assert [sleeper.session_id for sleeper in found] == [at_old, nowhere], "the latest used first"
    assert (found[0].tokens, found[0].version) == (123, "v1")
    assert {sleeper.session_id for sleeper in journal.sleepers("v1", 10, 0.0)} == {at_new, nowhere}
    assert journal.sleepers("v2", 1, 0.0) == found[:1]
    assert journal.sleepers("v2", 10, journal.now() + 1) == []


def test_gaps_between_turns(url: str) -> None:
    now = 1000.0
    with Journal.open(url, clock=lambda: now) as journal:
        one, two = journal.create_session("acme").id, journal.create_session("acme").id
        head = None
        for at in (100.0, 130.0, 200.0):
            choices = [turn(one, head, created_at=at, choice_index=index) for index in range(2)]
            head = journal.add_responses(choices)[0].id
        journal.add_response(turn(two, None, created_at=400.0))
        ended, going_on = journal.return_gaps(100)
        assert (sorted(ended), sorted(going_on)) == ([30.0, 70.0], [600.0, 800.0])
        assert journal.return_gaps(2)[0] == []
