"""Responses: exact token ids, one winner for each turn, chains across forks."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.journal import Conflict, InvalidRecord, Journal, NotFound
from memory.journal.base import pack_ids, unpack_ids
from tests.memory.journal.conftest import turn


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_survive_packing(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert len(pack_ids(ids)) == 4 * len(ids)


@pytest.mark.parametrize("ids", [[-1], [2**32], ["x"]])
def test_ids_that_are_none_are_refused(journal: Journal, ids: list[int]) -> None:
    session = journal.create_session("acme")
    with pytest.raises(InvalidRecord):
        journal.add_response(turn(session.id, None, input_ids=ids))


def test_a_reply_is_read_back_as_given(journal: Journal) -> None:
    session = journal.create_session("acme")
    new = turn(session.id, None, spans=[{"start": 0, "end": 3, "source": "disk"}], params={"seed": 1}, ttft_ms=1.5)
    stored = journal.add_response(replace(new, id="resp_given", created_at=12.5, cached_tokens=2))
    assert (stored.id, stored.created_at, stored.cached_tokens) == ("resp_given", 12.5, 2)
    assert (stored.input_ids, stored.spans, stored.ttft_ms) == ([1, 2, 3], new.spans, 1.5)
    assert journal.get_response("acme", stored.id) == stored
    assert journal.get_session("acme", session.id).head_response == stored.id
    with pytest.raises(NotFound):
        journal.get_response("other", stored.id)


def test_the_chain_runs_through_forks(journal: Journal) -> None:
    session = journal.create_session("acme")
    first = journal.add_response(turn(session.id, None, input_ids=[10], output_ids=[11]))
    second = journal.add_response(turn(session.id, first.id, input_ids=[12], output_ids=[13]))
    fork = journal.create_session("acme", head=first.id)
    third = journal.add_response(turn(fork.id, first.id, input_ids=[14], output_ids=[]))
    assert journal.chain(third.id) == [first, third]
    assert journal.session_token_ids(third.id) == [10, 11, 14]
    assert journal.session_token_ids(second.id) == [10, 11, 12, 13]
    assert journal.list_responses("acme", session.id) == [first, second]
    with pytest.raises(NotFound):
        journal.chain("resp_nothing")


def test_a_turn_from_an_old_head_loses_and_leaves_nothing(journal: Journal) -> None:
    session = journal.create_session("acme")
    first = journal.add_response(turn(session.id, None))
    for parent in (None, "resp_nothing"):
        with pytest.raises(Conflict):
            journal.add_response(turn(session.id, parent))
    with pytest.raises(Conflict):
        journal.add_response(turn(session.id, first.id, id=first.id))
    assert journal.list_responses("acme", session.id) == [first]
    assert journal.get_session("acme", session.id).head_response == first.id


def test_an_unknown_or_foreign_session_takes_no_reply(journal: Journal) -> None:
    session = journal.create_session("acme")
    with pytest.raises(NotFound):
        journal.add_response(turn("sess_nothing", None))
    with pytest.raises(NotFound):
        journal.add_response(turn(session.id, None, tenant="other"))


def test_choices_of_a_turn_are_siblings(journal: Journal) -> None:
    session = journal.create_session("acme")
    stored = journal.add_responses([turn(session.id, None, choice_index=index) for index in range(3)])
    assert [choice.choice_index for choice in stored] == [0, 1, 2]
    assert journal.get_session("acme", session.id).head_response == stored[0].id
    with pytest.raises(InvalidRecord):
        journal.add_responses([turn(session.id, stored[0].id), turn(session.id, stored[1].id)])


def test_the_newest_match_of_a_history_wins(journal: Journal) -> None:
    session = journal.create_session("acme")
    first = journal.add_response(turn(session.id, None, history_digest=b"h" * 32))
    second = journal.add_response(turn(session.id, first.id, history_digest=b"h" * 32))
    assert journal.find_by_history("acme", b"h" * 32) == second
    assert journal.find_by_history("other", b"h" * 32) is None
    assert journal.find_by_history("acme", b"x" * 32) is None


def test_one_of_many_racing_turns_wins(journal: Journal) -> None:
    session = journal.create_session("acme")
    results: list[str] = []
    start = threading.Barrier(8)

    def race() -> None:
        start.wait()
        try:
            results.append(journal.add_response(turn(session.id, None)).id)
        except Conflict:
            results.append("")

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results)[:-1] == [""] * 7
    assert [response.id for response in journal.list_responses("acme", session.id)] == [max(results)]


def test_threads_write_their_own_sessions_at_once(journal: Journal) -> None:
    failures: list[BaseException] = []

    def talk() -> None:
        try:
            session, head = journal.create_session("acme"), None
            for _ in range(5):
                head = journal.add_response(turn(session.id, head)).id
                journal.add_feedback("acme", "boolean", True, response_id=head)
        except BaseException as error:  # noqa: BLE001 - reported by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=talk) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert journal.count_feedback() == 60
