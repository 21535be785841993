"""Sessions: split at birth, tenants apart, forks, deletion with a receipt."""

from __future__ import annotations

from pathlib import Path

import pytest

from memory.journal import Conflict, InvalidRecord, Journal, JournalSettings, NotFound
from tests.memory.journal.conftest import turn


def test_a_session_is_read_back_as_created(journal: Journal) -> None:
    made = journal.create_session("acme", metadata={"topic": "lamps"})
    assert made.id.startswith("sess_")
    assert made.head_response is None
    assert journal.get_session("acme", made.id) == made
    assert made.metadata == {"topic": "lamps"}


def test_another_tenant_sees_nothing(journal: Journal) -> None:
    made = journal.create_session("acme")
    for read in (journal.get_session, journal.list_responses, journal.delete_session):
        with pytest.raises(NotFound):
            read("other", made.id)
    assert journal.list_sessions("other") == []


def test_an_id_is_taken_within_its_tenant_only(journal: Journal) -> None:
    journal.create_session("acme", "mine")
    with pytest.raises(Conflict):
        journal.create_session("acme", "mine")
    assert journal.create_session("other", "mine").tenant == "other"


@pytest.mark.parametrize("name", ["", "x" * 129])
def test_an_impossible_id_is_refused(journal: Journal, name: str) -> None:
    with pytest.raises(InvalidRecord):
        journal.create_session("acme", name)


def test_the_split_follows_the_share_and_the_id(tmp_path: Path) -> None:
    with Journal.open(f"sqlite:///{tmp_path}/a.db", JournalSettings(eval_share=0.5)) as first:
        splits = {name: first.create_session("acme", name).split for name in map(str, range(60))}
    with Journal.open(f"sqlite:///{tmp_path}/b.db", JournalSettings(eval_share=0.5)) as second:
        assert splits == {name: second.create_session("acme", name).split for name in splits}
    assert 10 < list(splits.values()).count("eval") < 50


@pytest.mark.parametrize(("share", "split"), [(0.0, "train"), (1.0, "eval")])
def test_the_ends_of_the_share(url: str, share: float, split: str) -> None:
    with Journal.open(url, JournalSettings(eval_share=share)) as journal:
        assert journal.create_session("acme").split == split


def test_a_fork_keeps_its_parents_split_and_head(journal: Journal) -> None:
    for number in range(20):
        parent = journal.create_session("acme", f"parent {number}")
        reply = journal.add_response(turn(parent.id, None))
        fork = journal.create_session("acme", head=reply.id)
        assert (fork.split, fork.parent_session, fork.head_response) == (parent.split, parent.id, reply.id)


def test_a_fork_cannot_carry_words_across_the_split(journal: Journal) -> None:
    sessions = [journal.create_session("acme", f"s{number}") for number in range(40)]
    train = next(session for session in sessions if session.split == "train")
    kept = next(session for session in sessions if session.split == "eval")
    reply = journal.add_response(turn(kept.id, None))
    assert journal.create_session("acme", head=reply.id, parent=train.id).split == "eval"


def test_a_fork_of_something_unknown_is_refused(journal: Journal) -> None:
    reply = journal.add_response(turn(journal.create_session("acme").id, None))
    with pytest.raises(NotFound):
        journal.create_session("acme", head="resp_nothing")
    with pytest.raises(NotFound):
        journal.create_session("other", head=reply.id)
    with pytest.raises(NotFound):
        journal.create_session("acme", parent="sess_nothing")


def test_pages_are_newest_first(journal: Journal) -> None:
    names = [journal.create_session("acme").id for _ in range(5)]
    first = journal.list_sessions("acme", limit=2)
    second = journal.list_sessions("acme", limit=2, after=first[-1].id)
    assert [session.id for session in first + second] == names[:0:-1]
    with pytest.raises(NotFound):
        journal.list_sessions("acme", after="sess_nothing")


def test_deletion_takes_the_words_and_the_forks_that_hold_them(journal: Journal, tmp_path: Path) -> None:
    secret = "tourmaline"
    parent = journal.create_session("acme", metadata={"note": secret})
    reply = journal.add_response(turn(parent.id, None, secret))
    fork = journal.create_session("acme", head=reply.id)
    ahead = journal.add_response(turn(fork.id, reply.id, "more"))
    grandchild = journal.create_session("acme", head=ahead.id)
    other = journal.create_session("acme")
    kept = journal.add_response(turn(other.id, None, "kept"))
    journal.add_feedback("acme", "demonstration", secret, response_id=reply.id)
    journal.record_dataset("d1", "/somewhere", [("acme", fork.id), ("acme", other.id)])
    journal.record_version("d1", "kvloop@v7")

    receipt = journal.delete_session("acme", parent.id)

    assert receipt.sessions == (parent.id, fork.id, grandchild.id)
    assert (receipt.responses, receipt.feedback) == (2, 1)
    assert (receipt.datasets, receipt.versions) == (("d1",), ("kvloop@v7",))
    assert journal.deleted_in_dataset("d1") == [fork.id]
    assert [session.id for session in journal.list_sessions("acme")] == [other.id]
    assert journal.get_response("acme", kept.id) == kept
    assert journal.list_feedback() == []
    assert list(journal.demonstrations()) == []
    with pytest.raises(NotFound):
        journal.chain(ahead.id)
    with pytest.raises(NotFound):
        journal.delete_session("acme", parent.id)
    with pytest.raises(Conflict):
        journal.create_session("acme", parent.id)
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("journal.db*"))
    assert secret.encode() not in stored


def test_deleting_a_fork_leaves_what_it_forked_from(journal: Journal) -> None:
    parent = journal.create_session("acme")
    reply = journal.add_response(turn(parent.id, None))
    fork = journal.create_session("acme", head=reply.id)
    sibling = journal.create_session("acme", head=reply.id, parent=fork.id)
    assert journal.delete_session("acme", fork.id).sessions == (fork.id,)
    assert {session.id for session in journal.list_sessions("acme")} == {parent.id, sibling.id}
    assert journal.chain(reply.id) == [reply]


def test_what_a_session_taught_can_be_asked_later(journal: Journal) -> None:
    session = journal.create_session("acme")
    journal.record_dataset("d1", "/somewhere", [("acme", session.id)])
    journal.record_dataset("d1", "/elsewhere", [("acme", "ignored: the digest is known")])
    journal.delete_session("acme", session.id)
    journal.record_version("d1", "v1")
    journal.record_version("d1", "v1")
    assert journal.trained_on("acme", session.id) == (("d1",), ("v1",))
    with pytest.raises(NotFound):
        journal.record_version("unknown", "v2")
