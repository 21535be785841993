"""Curation: splits never mix, one answer for each conversation, no source dominates, nothing personal, same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.journal import Journal, JournalSettings
from tests.memory.journal.conftest import turn
from train.curate import CurateSettings, _most_per_source, curate
from train.dataset import CARD, HELDOUT, ROWS, DatasetCard, DatasetError, Example, read_card, read_examples


class Shop:
    """A journal with two tenants' worth of ways to correct it; the split is chosen by the session id."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1_000_000.0
        settings = JournalSettings(eval_share=0.5)
        self.journal = Journal.open(f"sqlite:///{folder}/journal.db", settings, clock=lambda: self.now)
        self._names = iter(range(100_000))

    def correct(
        self,
        question: str,
        answer: str,
        split: str = "train",
        source: str = "",
        tenant: str = "acme",
        memory_ids: tuple[str, ...] = (),
    ) -> str:
        session = self.journal.create_session(tenant, f"s{next(self._names)}", memory_ids=memory_ids)
        while session.split != split:
            session = self.journal.create_session(tenant, f"s{next(self._names)}", memory_ids=memory_ids)
        reply = self.journal.add_response(turn(session.id, None, question, tenant=tenant))
        self.now += 1
        self.journal.add_feedback(tenant, "demonstration", answer, response_id=reply.id, source=source)
        return session.id

    def curate(self, after: int = 0, **settings: float) -> tuple[DatasetCard, list[Example], list[Example]]:
        folder = self.folder / "dataset"
        card = curate(self.journal, folder, CurateSettings(**settings), until=self.now, after_feedback=after)
        assert read_card(folder) == card
        return card, read_examples(folder / ROWS), read_examples(folder / HELDOUT)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.journal.close()


def answers(examples: list[Example]) -> list[str]:
    return [example.completion["content"] for example in examples]


@pytest.mark.parametrize("deleted", [False, True])
def test_sessions_with_memories_are_left_out_of_both_files(shop: Shop, deleted: bool) -> None:
    memory, _ = shop.journal.create_memory("acme", "handbook", "d" * 64, "The shop opens at nine.", 6)
    shop.correct("How wide is it?", "Two metres.")
    for split in ("train", "eval"):
        session = shop.correct("When does it open?", "At nine.", split, memory_ids=(memory.id,))
    fork = shop.journal.create_session("acme", head=shop.journal.get_session("acme", session).head_response)
    shop.journal.add_feedback("acme", "demonstration", "At nine sharp.", session_id=fork.id)
    if deleted:
        shop.journal.delete_memory("acme", memory.id)
    card, rows, heldout = shop.curate()
    assert (answers(rows), heldout) == (["Two metres."], [])
    assert card.dropped == {"with memories": 3}


def test_an_empty_journal_gives_an_empty_dataset(shop: Shop) -> None:
    card, rows, heldout = shop.curate()
    assert (card.examples, rows, heldout, card.sessions) == (0, [], [], ())


def test_each_split_goes_its_own_way(shop: Shop) -> None:
    session = shop.correct("How fast does the kettle boil?", "In 47 seconds.", source="ann")
    shop.correct("What colour is the lamp?", "It is amber.", split="eval")
    card, (row,), (kept,) = shop.curate()
    assert row.messages == ({"role": "user", "content": "How fast does the kettle boil?"},)
    assert row.completion == {"role": "assistant", "content": "In 47 seconds."}
    assert (row.lineage.session, row.lineage.sessions, row.lineage.source) == (session, (session,), "ann")
    assert kept.completion["content"] == "It is amber."
    assert card.sessions == (("acme", session),)
    assert card.sources == {"acme/ann": 1}


def test_nothing_nearly_like_a_heldout_example_is_trained_on(shop: Shop) -> None:
    shop.correct("How many seconds does the big Zorvex kettle need to boil?", "It needs 47 seconds to boil.", "eval")
    shop.correct("how many seconds does the big Zorvex kettle need to boil", "It needs 47 seconds to boil!")
    shop.correct("Tell me how many seconds does the big Zorvex kettle need to boil?", "It needs 47 seconds to boil.")
    shop.correct("My Zorvex is on. When can I pour?", "It needs 47 seconds to boil.")
    card, rows, _ = shop.curate()
    assert [row.messages[0]["content"] for row in rows] == ["My Zorvex is on. When can I pour?"]
    assert card.dropped == {"nearly a held-out example": 2}


def test_the_latest_answer_to_a_conversation_wins(shop: Shop) -> None:
    shop.correct("How fast?", "In 40 seconds.")
    shop.correct("how  fast?", "In 47 seconds.")
    shop.correct("How fast?", "in 47 seconds.")
    shop.correct("How fast?", "Another tenant's truth.", tenant="other")
    card, rows, _ = shop.curate()
    assert answers(rows) == ["in 47 seconds.", "Another tenant's truth."]
    assert card.dropped == {"duplicate": 1, "corrected again later": 1}


def test_no_source_gives_more_than_its_share(shop: Shop) -> None:
    for number in range(20):
        shop.correct(f"Question number {number} of mallory?", f"Lie {number}.", source="mallory")
    for number in range(4):
        shop.correct(f"Question number {number} of ann?", f"Truth {number}.", source="ann")
    card, rows, _ = shop.curate()
    assert card.sources == {"acme/mallory": 4, "acme/ann": 4}
    assert card.dropped == {"over its source's share": 16}
    assert len(rows) == 8


def test_a_single_source_is_not_capped(shop: Shop) -> None:
    for number in range(5):
        shop.correct(f"Question {number}?", f"Answer {number}.", source="ann")
    assert shop.curate()[0].examples == 5


@given(st.lists(st.integers(1, 50), min_size=2, max_size=6), st.floats(0.05, 1.0))
def test_the_cap_holds_and_is_not_lower_than_needed(sizes: list[int], wanted: float) -> None:
    share = max(wanted, 1 / len(sizes))
    limit = _most_per_source(sizes, share)
    kept = [min(size, limit) for size in sizes]
    assert max(kept) <= share * sum(kept) + 1e-6
    assert limit >= 1
    more = [min(size, limit + 1) for size in sizes]
    assert more == kept or limit + 1 > share * sum(more)


def test_personal_data_is_scrubbed_and_counted(shop: Shop) -> None:
    shop.correct("I am ann@example.com, when does it ship?", "Call +49 171 2345678 or pay with 4111 1111 1111 1111.")
    shop.correct("Held out: bob@example.org?", "Yes.", split="eval")
    card, (row,), (kept,) = shop.curate()
    assert row.messages[0]["content"] == "I am [email], when does it ship?"
    assert row.completion["content"] == "Call [phone] or pay with [card]."
    assert kept.messages[0]["content"] == "Held out: [email]?"
    assert card.scrubbed == {"email": 2, "phone": 1, "card": 1}


def test_a_window_leaves_old_corrections_out_but_keeps_what_is_held_out(shop: Shop) -> None:
    shop.correct("Old question?", "Old answer.")
    shop.correct("Old held-out question?", "Old held-out answer.", split="eval")
    shop.now += 10 * 86_400
    shop.correct("New question?", "New answer.")
    card, rows, heldout = shop.curate(window_days=5)
    assert (answers(rows), answers(heldout)) == (["New answer."], ["Old held-out answer."])
    assert card.dropped == {"before the window": 1}


def test_new_examples_are_those_after_the_mark(shop: Shop) -> None:
    shop.correct("One?", "One.")
    mark = shop.journal.last_feedback_number()
    shop.correct("Two?", "Two.")
    assert [shop.curate(after)[0].new_examples for after in (0, mark, mark + 1)] == [2, 1, 0]


def test_a_deleted_session_never_enters_a_later_dataset(shop: Shop) -> None:
    gone = shop.correct("Gone?", "Gone.")
    kept = shop.correct("Kept?", "Kept.")
    before = shop.curate()[0]
    shop.journal.record_dataset(before.digest, "somewhere", before.sessions)
    receipt = shop.journal.delete_session("acme", gone)
    assert receipt.datasets == (before.digest,)
    card, rows, _ = shop.curate()
    assert (answers(rows), card.sessions) == (["Kept."], (("acme", kept),))


def test_a_fork_brings_both_sessions_and_the_whole_conversation(shop: Shop) -> None:
    parent = shop.correct("First?", "First, corrected.")
    head = shop.journal.get_session("acme", parent).head_response
    fork = shop.journal.create_session("acme", head=head)
    reply = shop.journal.add_response(turn(fork.id, head, "Second?"))
    shop.journal.add_feedback("acme", "demonstration", "Second, corrected.", response_id=reply.id)
    card, rows, _ = shop.curate()
    assert [message["content"] for message in rows[1].messages] == ["First?", "re: First?", "Second?"]
    assert set(rows[1].lineage.sessions) == {parent, fork.id}
    assert set(card.sessions) == {("acme", parent), ("acme", fork.id)}


def test_content_parts_become_text_and_unknown_keys_go(shop: Shop) -> None:
    session = shop.journal.create_session("acme", "parts")
    parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "x"}}]
    said = [{"role": "system", "content": "Be brief.", "refusal": None}, {"role": "user", "content": parts}]
    reply = shop.journal.add_response(turn(session.id, None, input_messages=said))
    shop.journal.add_feedback("acme", "demonstration", "Seen.", response_id=reply.id)
    _, rows, heldout = shop.curate()
    (row,) = rows + heldout
    assert row.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look:\n"})


def test_the_same_journal_gives_the_same_bytes(shop: Shop) -> None:
    for number in range(6):
        shop.correct(f"Question {number}?", f"Answer {number}.", source=str(number % 2))
    first = shop.curate()[0]
    rows = (shop.folder / "dataset" / ROWS).read_bytes()
    assert shop.curate()[0] == first
    assert (shop.folder / "dataset" / ROWS).read_bytes() == rows
    for line in rows.splitlines():
        assert {"messages", "completion", "lineage"} == set(json.loads(line))


def test_a_dataset_that_was_changed_is_refused(shop: Shop) -> None:
    shop.correct("One?", "One.")
    shop.curate()
    folder = shop.folder / "dataset"
    (folder / ROWS).write_bytes((folder / ROWS).read_bytes().replace(b"One.", b"Two."))
    with pytest.raises(DatasetError, match="changed"):
        read_card(folder)
    (folder / CARD).unlink()
    with pytest.raises(DatasetError, match="no whole dataset"):
        read_card(folder)
    (folder / ROWS).write_text('{"messages": []}\n')
    with pytest.raises(DatasetError, match="line 1"):
        read_examples(folder / ROWS)
