"""Memories: one text a name, gone when deleted or expired, and what sessions attach of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memory.journal import Conflict, Gone, Journal, NotFound
from tests.memory.journal.conftest import turn

CODE = "t" * 64


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(url: str, clock: Clock) -> Iterator[Journal]:
    with Journal.open(url, clock=clock) as opened:
        yield opened


def _make(journal: Journal, name: str = "n", digest: str = "d", tenant: str = "acme", end: float | None = None) -> str:
    return journal.create_memory(tenant, name, digest, f"text of {name}", 3, end)[0].id


def test_a_name_stands_for_one_text(journal: Journal) -> None:
    memory, new = journal.create_memory("acme", "n", "d", "words", 3)
    assert new
    assert journal.create_memory("acme", "n", "d", "words", 3, expires_at=9e9) == (memory, False)
    assert journal.get_memory("acme", memory.id) == memory
    with pytest.raises(Conflict, match=memory.id):
        journal.create_memory("acme", "n", "other", "other", 1)
    assert journal.create_memory("other", "n", "other", "other", 1)[1]
    with pytest.raises(NotFound):
        journal.get_memory("other", memory.id)
    journal.delete_memory("acme", memory.id)
    assert journal.create_memory("acme", "n", "other", "other", 1)[1]


def test_pages_are_newest_first(journal: Journal) -> None:
    names = [_make(journal, str(number)) for number in range(5)]
    first = journal.list_memories("acme", limit=2)
    second = journal.list_memories("acme", limit=9, after=first[-1].id)
    assert [memory.id for memory in first + second] == names[::-1]


def test_a_deleted_memory_leaves_no_words(journal: Journal, tmp_path: Path) -> None:
    secret = "tourmaline"
    memory = journal.create_memory("acme", secret, "d", f"the {secret} word", 4)[0].id
    other = _make(journal)
    journal.put_prefix("acme", [memory], CODE, [7, 8, 9])
    journal.put_prefix("acme", [other, memory], CODE, [1, 2])
    journal.put_prefix("acme", [other], CODE, [5])
    attached = journal.create_session("acme", memory_ids=[other, memory])
    journal.create_session("acme", memory_ids=[other])
    journal.record_dataset("d1", "/somewhere", [("acme", attached.id)])
    journal.record_version("d1", "v7")
    assert journal.memory_prefixes("acme", memory) == [(memory,), (other, memory)]
    assert journal.memory_sessions("acme", memory) == [attached.id]
    receipt = journal.delete_memory("acme", memory)
    assert (receipt.sessions, receipt.datasets, receipt.versions) == ((attached.id,), ("d1",), ("v7",))
    for ask in (
        lambda: journal.get_memory("acme", memory),
        lambda: journal.delete_memory("acme", memory),
        lambda: journal.get_prefix("acme", [other, memory], CODE),
        lambda: journal.put_prefix("acme", [memory], CODE, [7]),
        lambda: journal.create_session("acme", memory_ids=[memory]),
        lambda: journal.read_memories("acme", [other, memory]),
    ):
        with pytest.raises(Gone) as gone:
            ask()
        assert (gone.value.name, gone.value.why) == (memory, "deleted")
    assert journal.memory_prefixes("acme", memory) == []
    assert [memory.id for memory in journal.list_memories("acme")] == [other]
    assert journal.get_session("acme", attached.id).memory_ids == (other, memory)
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("journal.db*"))
    assert secret.encode() not in stored


def test_an_expired_memory_is_not_read(timed: Journal, clock: Clock) -> None:
    memory, other = _make(timed, end=1010.0), _make(timed, "other", end=1020.0)
    prefix = timed.put_prefix("acme", [other, memory], CODE, [1, 2])
    assert prefix.expires_at == 1010.0
    assert timed.latest_prefixes(CODE, 9) == [prefix]
    assert timed.expired_memories() == []
    clock.now = 1010.0
    with pytest.raises(Gone) as gone:
        timed.get_memory("acme", memory)
    assert gone.value.why == "expired"
    assert timed.latest_prefixes(CODE, 9) == []
    assert timed.expired_memories() == [("acme", memory)]
    assert timed.create_memory("acme", "n", "other", "other", 1)[1], "its name is free"
    timed.delete_memory("acme", memory)
    assert timed.expired_memories() == []


def test_a_prefix_is_stored_once_for_a_tokenizer(journal: Journal) -> None:
    one, two = _make(journal, "1"), _make(journal, "2")
    assert journal.get_prefix("acme", [one, two], CODE) is None
    stored = journal.put_prefix("acme", [one, two], CODE, [1, 2, 3])
    assert journal.put_prefix("acme", [one, two], CODE, [9]) == stored
    assert journal.get_prefix("acme", [one, two], CODE) == stored
    assert journal.get_prefix("acme", [two, one], CODE) is None, "the order counts"
    assert journal.get_prefix("acme", [one, two], "u" * 64) is None
    assert journal.put_prefix("acme", [one, two], "u" * 64, [4]).token_ids == [4]
    with pytest.raises(NotFound):
        journal.get_prefix("other", [one], CODE)


def test_memories_are_attached_before_the_first_turn(journal: Journal) -> None:
    one, two = _make(journal, "1"), _make(journal, "2")
    session = journal.create_session("acme")
    attached = journal.attach_memories("acme", session.id, [one, two])
    assert attached.memory_ids == (one, two)
    assert journal.attach_memories("acme", session.id, [one, two]) == attached
    with pytest.raises(Conflict):
        journal.attach_memories("acme", session.id, [two])
    begun = journal.create_session("acme")
    reply = journal.add_response(turn(begun.id, None))
    with pytest.raises(Conflict):
        journal.attach_memories("acme", begun.id, [one])
    with pytest.raises(NotFound):
        journal.attach_memories("acme", journal.create_session("acme").id, ["mem_none"])
    assert journal.create_session("acme", head=reply.id, memory_ids=[one]).memory_ids == (), "a fork has its origin's"
    said = journal.add_response(turn(session.id, None))
    assert journal.create_session("acme", head=said.id).memory_ids == (one, two)


def test_an_expired_session_is_found_by_nothing_but_its_deletion(timed: Journal, clock: Clock) -> None:
    session = timed.create_session("acme", expires_at=1010.0)
    reply = timed.add_response(turn(session.id, None))
    fork = timed.create_session("acme", head=reply.id, expires_at=5000.0)
    assert fork.expires_at == 1010.0
    assert timed.create_session("acme", head=reply.id, expires_at=1005.0).expires_at == 1005.0
    assert timed.find_by_history("acme", b"\x01" * 32) == reply
    clock.now = 1010.0
    for ask in (
        lambda: timed.get_session("acme", session.id),
        lambda: timed.list_responses("acme", session.id),
        lambda: timed.get_response("acme", reply.id),
        lambda: timed.add_response(turn(session.id, reply.id)),
        lambda: timed.create_session("acme", head=reply.id),
        lambda: timed.create_session("acme", parent=session.id),
        lambda: timed.list_sessions("acme", after=session.id),
        lambda: timed.attach_memories("acme", session.id, []),
    ):
        with pytest.raises(NotFound):
            ask()
    assert timed.find_by_history("acme", b"\x01" * 32) is None
    assert timed.list_sessions("acme") == []
    assert ("acme", session.id) in timed.expired_sessions()
    assert set(timed.delete_session("acme", session.id).sessions) >= {session.id, fork.id}
    assert timed.expired_sessions() == []
