"""Feedback: four kinds, checked values, demonstrations with their history."""

from __future__ import annotations

from typing import Any

import pytest

from memory.journal import InvalidRecord, Journal, NotFound
from tests.memory.journal.conftest import turn


@pytest.mark.parametrize(
    ("kind", "value"), [("boolean", False), ("float", 0.5), ("float", 3), ("comment", "ok"), ("demonstration", "no")]
)
def test_each_kind_is_stored(journal: Journal, kind: Any, value: Any) -> None:
    reply = journal.add_response(turn(journal.create_session("acme").id, None))
    given = journal.add_feedback("acme", kind, value, response_id=reply.id, source="ann")
    assert (given.value, given.session_id, given.response_id) == (value, reply.session_id, reply.id)
    assert journal.list_feedback(tenant="acme", kind=kind, response_id=reply.id) == [given]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("boolean", 1),
        ("float", True),
        ("float", float("nan")),
        ("float", 10**400),
        ("float", "1"),
        ("comment", " "),
        ("demonstration", ""),
        ("demonstration", 5),
        ("stars", 5),
    ],
)
def test_a_value_that_does_not_fit_is_refused(journal: Journal, kind: Any, value: Any) -> None:
    reply = journal.add_response(turn(journal.create_session("acme").id, None))
    with pytest.raises(InvalidRecord):
        journal.add_feedback("acme", kind, value, response_id=reply.id)
    assert journal.count_feedback() == 0


def test_the_target_must_exist_and_agree(journal: Journal) -> None:
    reply = journal.add_response(turn(journal.create_session("acme").id, None))
    empty = journal.create_session("acme")
    with pytest.raises(InvalidRecord):
        journal.add_feedback("acme", "boolean", True)
    with pytest.raises(InvalidRecord):
        journal.add_feedback("acme", "boolean", True, response_id=reply.id, session_id=empty.id)
    with pytest.raises(InvalidRecord):
        journal.add_feedback("acme", "demonstration", "better", session_id=empty.id)
    with pytest.raises(NotFound):
        journal.add_feedback("other", "boolean", True, response_id=reply.id)
    with pytest.raises(NotFound):
        journal.add_feedback("other", "boolean", True, session_id=empty.id)
    assert journal.add_feedback("acme", "boolean", True, session_id=empty.id).response_id is None


def test_counting_after_a_mark(journal: Journal) -> None:
    reply = journal.add_response(turn(journal.create_session("acme").id, None))
    assert journal.last_feedback_number() == 0
    first = journal.add_feedback("acme", "boolean", True, response_id=reply.id)
    mark = journal.last_feedback_number()
    second = journal.add_feedback("acme", "comment", "hm", response_id=reply.id)
    assert journal.count_feedback() == 2
    assert journal.count_feedback(after=mark) == 1
    assert journal.count_feedback(kind="comment", tenant="acme") == 1
    assert journal.count_feedback(since=second.created_at) == 0
    assert journal.list_feedback() == [second, first]
    assert journal.list_feedback(since=first.created_at, session_id=reply.session_id) == [second]


def test_a_demonstration_brings_the_whole_history(journal: Journal) -> None:
    session = journal.create_session("acme")
    first = journal.add_response(turn(session.id, None, "one"))
    second = journal.add_response(turn(session.id, first.id, "two"))
    journal.add_feedback("acme", "demonstration", "better one", response_id=first.id, source="ann")
    journal.add_feedback("acme", "demonstration", "better two", session_id=session.id)
    one, two = journal.demonstrations()
    assert (one.answer, one.response, one.feedback.source, one.split) == ("better one", first, "ann", session.split)
    assert one.history == [{"role": "user", "content": "one"}]
    assert two.response == second
    assert two.sessions == (session.id,)
    assert [message["content"] for message in two.history] == ["one", "re: one", "two"]


def test_demonstrations_come_in_order_over_pages_and_within_a_window(url: str) -> None:
    now = iter(range(1_000))
    with Journal.open(url, clock=lambda: float(next(now))) as journal:
        reply = journal.add_response(turn(journal.create_session("acme").id, None))
        given = [
            journal.add_feedback("acme", "demonstration", str(number), response_id=reply.id) for number in range(130)
        ]
        assert [row.answer for row in journal.demonstrations()] == [str(number) for number in range(130)]
        window = journal.demonstrations(since=given[9].created_at, until=given[12].created_at)
        assert [row.answer for row in window] == ["10", "11", "12"]
