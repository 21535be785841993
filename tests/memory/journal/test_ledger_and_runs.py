"""Ledger, serving state, runs with steps, leases."""

from __future__ import annotations

import pytest

from memory.journal import Conflict, Journal, LeaseLost, NotFound


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_the_ledger_grows_and_a_key_is_written_once(journal: Journal) -> None:
    first = journal.add_promotion("gate", "promote", None, "v1", "better", report="/r", key="run:promote")
    again = journal.add_promotion("gate", "promote", None, "v1", "better", report="/r", key="run:promote")
    second = journal.add_promotion("ann", "rollback", "v1", "base", "worse", seconds=0.5)
    assert again == first
    assert journal.list_promotions() == [second, first]
    assert journal.list_promotions(limit=1) == [second]
    assert journal.list_promotions(to_version="v1") == [first]


def test_the_serving_state_is_the_last_one_set(journal: Journal, url: str) -> None:
    assert journal.get_serving() is None
    journal.set_serving("base", None, None, "a" * 64)
    journal.set_serving("kvloop@v1", "/adapters/1", "1", "b" * 64, {"probes": []})
    with Journal.open(url) as restarted:
        state = restarted.get_serving()
    assert state is not None
    assert (state.name, state.path, state.version, state.fingerprint) == (
        "kvloop@v1",
        "/adapters/1",
        "1",
        {"probes": []},
    )


def test_a_step_keeps_its_first_result(journal: Journal) -> None:
    run = journal.create_run("retrain", {"recipe": "sft-kl"})
    assert journal.step(run.id, "curate") is None
    assert [journal.begin_attempt(run.id), journal.begin_attempt(run.id)] == [1, 2]
    assert journal.get_run(run.id).attempts == 2
    assert journal.finish_step(run.id, "curate", {"examples": 3}) == {"examples": 3}
    assert journal.finish_step(run.id, "curate", {"examples": 4}) == {"examples": 3}
    journal.finish_step(run.id, "train", {})
    assert [step.name for step in journal.list_steps(run.id)] == ["curate", "train"]
    journal.forget_step(run.id, "curate")
    assert journal.step(run.id, "curate") is None
    with pytest.raises(NotFound):
        journal.finish_step("run_nothing", "curate", {})


def test_a_run_ends_once(journal: Journal) -> None:
    run = journal.create_run("retrain", {})
    other = journal.create_run("retrain", {})
    done = journal.finish_run(run.id, {"verdict": "pass"})
    failed = journal.fail_run(other.id, "out of memory")
    assert (done.status, done.outcome, failed.status, failed.reason) == (
        "done",
        {"verdict": "pass"},
        "failed",
        "out of memory",
    )
    with pytest.raises(Conflict):
        journal.fail_run(run.id, "late")
    assert journal.list_runs("retrain") == [failed, done]
    assert journal.list_runs(status="running") == []
    assert journal.get_run(run.id) == done


def test_a_lease_has_one_owner_until_it_runs_out(url: str) -> None:
    clock = Clock()
    with Journal.open(url, clock=clock) as journal:
        assert journal.acquire_lease("retrain", "a", 10)
        assert not journal.acquire_lease("retrain", "b", 10)
        assert journal.acquire_lease("refresh", "b", 10)
        clock.now += 9
        journal.heartbeat("retrain", "a", 10)
        clock.now += 9
        lease = journal.get_lease("retrain")
        assert lease is not None
        assert (lease.owner, lease.expires_at) == ("a", clock.now + 1)
        clock.now += 1
        assert journal.get_lease("retrain") is None
        journal.heartbeat("retrain", "a", 10)
        clock.now += 10
        assert journal.acquire_lease("retrain", "b", 10)
        with pytest.raises(LeaseLost):
            journal.heartbeat("retrain", "a", 10)
        journal.release_lease("retrain", "a")
        assert not journal.acquire_lease("retrain", "a", 10)
        journal.release_lease("retrain", "b")
        assert journal.acquire_lease("retrain", "a", 10)


def test_who_slept_through_the_lease_writes_nothing(url: str) -> None:
    clock = Clock()
    with Journal.open(url, clock=clock) as journal:
        run = journal.create_run("retrain", {})
        journal.acquire_lease("retrain", "a", 10)
        journal.finish_step(run.id, "curate", {}, owner="a")
        clock.now += 11
        journal.begin_attempt(run.id, owner="a")  # nobody took the lease: nothing to fear
        assert journal.acquire_lease("retrain", "b", 10)
        for late in (
            lambda: journal.finish_step(run.id, "train", {}, owner="a"),
            lambda: journal.begin_attempt(run.id, owner="a"),
            lambda: journal.forget_step(run.id, "curate", owner="a"),
            lambda: journal.finish_run(run.id, {}, owner="a"),
            lambda: journal.fail_run(run.id, "", owner="a"),
        ):
            with pytest.raises(LeaseLost):
                late()
        assert journal.get_run(run.id).status == "running"
        assert [step.name for step in journal.list_steps(run.id)] == ["curate"]
