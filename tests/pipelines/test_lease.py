"""A held lease stays alive, is given back, and its loss is noticed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memory.journal import Journal, LeaseLost
from pipelines.lease import Busy, HeldLease


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(f"sqlite:///{tmp_path}/journal.db") as opened:
        yield opened


def wait_for_loss(lease: HeldLease) -> None:
    for _ in range(500):
        lease.check()
        time.sleep(0.02)


def test_a_heartbeat_keeps_it_longer_than_it_was_taken_for(journal: Journal) -> None:
    with HeldLease(journal, "job", 0.3) as lease:
        first = journal.get_lease("job")
        time.sleep(0.6)
        lease.check()
        second = journal.get_lease("job")
        assert first is not None
        assert second is not None
        assert second.expires_at > first.expires_at
        with pytest.raises(Busy), HeldLease(journal, "job", 0.3):
            pass
        with HeldLease(journal, "another kind", 0.3):
            pass
    assert journal.get_lease("job") is None


def test_a_lease_taken_by_another_is_noticed_and_not_given_back(journal: Journal) -> None:
    with HeldLease(journal, "job", 0.15) as lease:
        with journal._writing() as connection:
            connection.exec_driver_sql("UPDATE leases SET owner = 'thief', expires_at = expires_at + 60")
        with pytest.raises(LeaseLost):
            wait_for_loss(lease)
    held = journal.get_lease("job")
    assert held is not None
    assert held.owner == "thief"


def test_a_journal_that_does_not_answer_counts_as_lost(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlalchemy.exc import OperationalError

    def unreachable(*arguments: object) -> None:
        raise OperationalError("UPDATE", {}, Exception("disk"))

    with HeldLease(journal, "job", 0.15) as lease, monkeypatch.context() as patch:
        patch.setattr(journal, "heartbeat", unreachable)
        with pytest.raises(LeaseLost):
            wait_for_loss(lease)
