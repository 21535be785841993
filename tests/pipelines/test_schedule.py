"""The schedule: cron's own meaning, feedback counted, interrupted runs resumed, all persistent, nothing twice."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from memory.journal import Journal
from pipelines.cron import BadCron, cron_trigger, weekdays
from pipelines.lease import HeldLease
from pipelines.retrain import KIND
from pipelines.runner import CommandRunner
from pipelines.schedule import FixedBySettings, Schedule, log_file
from pipelines.settings import ScheduleSettings
from tests.memory.journal.conftest import turn

PATIENCE = 20.0


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(f"sqlite:///{tmp_path}/journal.db") as opened:
        yield opened


@pytest.fixture
def settings(tmp_path: Path) -> ScheduleSettings:
    return ScheduleSettings(folder=tmp_path / "schedule", check_seconds=0.1)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def writes(file: Path, then: str = "") -> list[str]:
    """A command that adds a line to a file."""
    return [sys.executable, "-c", f"open({str(file)!r}, 'a').write('ran\\n'); {then}"]


def lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def give_feedback(journal: Journal, count: int) -> None:
    reply = journal.add_response(turn(journal.create_session("acme").id, None))
    for _ in range(count):
        journal.add_feedback("acme", "boolean", True, response_id=reply.id)


def fires(expression: str, begin: str, count: int, timezone: str = "UTC") -> list[str]:
    trigger = cron_trigger(expression, timezone)
    moment, found = datetime.fromisoformat(begin).replace(tzinfo=UTC), []
    for _ in range(count):
        moment = trigger.get_next_fire_time(None, moment)
        found.append(moment.astimezone(UTC).strftime("%a %d %H:%M"))
        moment += timedelta(seconds=1)
    return found


def test_cron_counts_weekdays_from_sunday() -> None:
    # 2026-03-01 is a Sunday.
    assert fires("30 4 * * 0", "2026-03-02", 2) == ["Sun 08 04:30", "Sun 15 04:30"]
    assert fires("30 4 * * 1-5", "2026-03-06", 2) == ["Fri 06 04:30", "Mon 09 04:30"]


def test_cron_takes_either_day_where_both_are_given() -> None:
    assert fires("0 0 13 * 5", "2026-03-07", 3) == ["Fri 13 00:00", "Fri 20 00:00", "Fri 27 00:00"]
    assert fires("0 0 10 * 5", "2026-03-07", 2) == ["Tue 10 00:00", "Fri 13 00:00"]


def test_cron_is_in_its_time_zone() -> None:
    assert fires("0 3 * * *", "2026-01-10", 1, "Europe/Berlin") == ["Sat 10 02:00"]


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("*", "*"),
        ("7", "sun"),
        ("sun-tue", "sun,mon,tue"),
        ("5-7", "sun,fri,sat"),
        ("*/2", "sun,tue,thu,sat"),
        ("Mon,WED", "mon,wed"),
        ("3/2", "wed,fri"),
    ],
)
def test_weekday_fields(field: str, names: str) -> None:
    assert weekdays(field) == names


@pytest.mark.parametrize(
    "expression", ["", "* * * *", "61 * * * *", "* * * * 8", "* * * * 5-1", "* * * * */0", "x * * * *", "0 3 30 2 *"]
)
def test_what_is_no_cron_expression_is_refused(expression: str, settings: ScheduleSettings) -> None:
    with pytest.raises(BadCron):
        Schedule(settings).set_cron(expression)
    assert Schedule(settings).planned() == []


def test_an_unknown_time_zone_is_refused() -> None:
    with pytest.raises(BadCron, match="Mars"):
        cron_trigger("0 3 * * *", "Mars/Olympus")


def test_triggers_are_stored_and_removed(settings: ScheduleSettings) -> None:
    Schedule(settings).set_cron("0 3 * * *")
    Schedule(settings).set_feedback(200)
    cron, feedback = Schedule(settings).planned()
    assert (cron.id, cron.description) == ("cron", "retrain at 0 3 * * * (UTC)")
    assert "200 new pieces of feedback" in feedback.description
    assert cron.next_run is not None
    assert cron.next_run > time.time()
    assert cron.as_json()["id"] == "cron"
    Schedule(settings).set_cron(None)
    Schedule(settings).set_feedback(None)
    Schedule(settings).set_feedback(None)
    assert Schedule(settings).planned() == []
    with pytest.raises(ValueError, match="ones or more"):
        Schedule(settings).set_feedback(0)


def test_what_the_settings_fix_is_changed_there(settings: ScheduleSettings) -> None:
    fixed = settings.model_copy(update={"cron": "0 3 * * *", "feedback_every": 5})
    schedule = Schedule(fixed)
    assert [planned.id for planned in schedule.planned()] == ["cron", "feedback"]
    with pytest.raises(FixedBySettings):
        schedule.set_cron(None)
    with pytest.raises(FixedBySettings):
        schedule.set_feedback(6)
    schedule.set_feedback(5)


def test_enough_feedback_starts_one_run(journal: Journal, settings: ScheduleSettings, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    schedule = Schedule(settings)
    schedule.set_feedback(3)
    give_feedback(journal, 2)
    schedule.start(journal, writes(ran))
    try:
        time.sleep(0.5)
        assert lines(ran) == 0
        give_feedback(journal, 1)
        wait_until(lambda: lines(ran) >= 1)
        # A run that began has looked at all of it.
        journal.finish_run(journal.create_run(KIND, {"last_feedback": journal.last_feedback_number()}).id, {})
        time.sleep(0.3)
        seen = lines(ran)
        time.sleep(0.5)
        assert lines(ran) == seen
    finally:
        schedule.stop()
    assert "3 new pieces of feedback" in log_file(settings).read_text()


def test_an_interrupted_run_is_resumed(journal: Journal, settings: ScheduleSettings, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    schedule = Schedule(settings)
    run = journal.create_run(KIND, {"last_feedback": 0})
    with HeldLease(journal, KIND, 30):
        schedule.start(journal, writes(ran))
        time.sleep(0.4)
        assert lines(ran) == 0
    try:
        wait_until(lambda: lines(ran) >= 1)
    finally:
        schedule.stop()
    assert f"{run.id} was interrupted" in log_file(settings).read_text()


def test_a_missed_time_is_made_up_for_and_another_process_is_heard(
    journal: Journal, settings: ScheduleSettings, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    running = Schedule(settings)
    running.start(journal, writes(ran))
    try:
        miss_a_time(settings)
        wait_until(lambda: lines(ran) == 1)
        assert [planned.id for planned in running.planned()] == ["cron"]
    finally:
        running.stop()


def miss_a_time(settings: ScheduleSettings) -> None:
    """What is stored then looks as if nothing had run for two days."""
    schedule = Schedule(settings)
    schedule.set_cron("0 3 * * *")
    with schedule._editing() as scheduler:
        scheduler.modify_job("cron", next_run_time=datetime.now(UTC) - timedelta(days=2))


def test_looking_at_the_schedule_does_not_use_up_a_missed_time(
    journal: Journal, settings: ScheduleSettings, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    miss_a_time(settings)
    for _ in range(2):
        (planned,) = Schedule(settings).planned()
        assert planned.next_run is not None
        assert planned.next_run < time.time()
    restarted = Schedule(settings)
    restarted.start(journal, writes(ran))
    try:
        wait_until(lambda: lines(ran) == 1)
    finally:
        restarted.stop()


def test_stopping_ends_the_command(journal: Journal, settings: ScheduleSettings, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    schedule = Schedule(settings)
    schedule.set_feedback(1)
    give_feedback(journal, 1)
    schedule.start(journal, writes(ran, "import time; time.sleep(600)"))
    wait_until(lambda: lines(ran) == 1)
    schedule.stop()
    schedule.stop()
    assert "KeyboardInterrupt" in log_file(settings).read_text()


def test_commands_do_not_overlap_and_failures_are_not_repeated_at_once(tmp_path: Path) -> None:
    runner = CommandRunner([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log", pause=60)
    assert runner.run("first") == 3
    assert runner.run("at once") is None
    assert runner.run("a scheduled time", after_failure=True) == 3
    runner.stop()
    assert runner.run("stopped", after_failure=True) is None


def test_a_command_that_ignores_the_interrupt_is_killed(tmp_path: Path) -> None:
    import threading

    stubborn = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    )
    runner = CommandRunner([sys.executable, "-c", stubborn], tmp_path / "log", pause=1, patience=0.2)
    statuses: list[int | None] = []
    thread = threading.Thread(target=lambda: statuses.append(runner.run("stubborn")))
    thread.start()
    wait_until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().endswith("1\n"))
    assert runner.run("another") is None
    runner.stop()
    thread.join()
    assert statuses == [-9]
