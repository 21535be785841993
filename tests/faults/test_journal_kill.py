"""What the journal acknowledged is there after `kill -9`, and two processes may open a fresh database at once."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from memory.journal import Journal

ROOT = Path(__file__).parents[2]

WRITER = """
import sys
from memory.journal import Journal
from tests.memory.journal.conftest import turn

journal = Journal.open(sys.argv[1])
while True:
    session, head = journal.create_session("acme"), None
    for number in range(5):
        head = journal.add_response(turn(session.id, head, str(number))).id
        given = journal.add_feedback("acme", "comment", "x", response_id=head)
        print(session.id, head, given.id, flush=True)
"""

OPENER = """
import sys
from memory.journal import Journal

with Journal.open(sys.argv[1]) as journal:
    print(journal.create_session("acme").id, flush=True)
"""


def test_kill_at_random_moments_loses_nothing_acknowledged(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/journal.db"
    moments = random.Random(7)
    acknowledged: list[list[str]] = []
    for _ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, url], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        lines = [writer.stdout.readline()]
        time.sleep(moments.uniform(0.0, 0.15))
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
        writer.stdout.close()
        writer.wait()
        acknowledged += [line.split() for line in lines if line.endswith("\n")]
        with Journal.open(url) as journal:
            for session, response, feedback in acknowledged:
                assert journal.get_response("acme", response).session_id == session
                assert journal.list_feedback(response_id=response)[0].id == feedback
            for session in journal.list_sessions("acme", limit=10_000):
                made = journal.list_responses("acme", session.id)
                assert session.head_response == (made[-1].id if made else None)
    assert len(acknowledged) >= 6


def test_processes_open_a_fresh_database_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new/journal.db"
    command = [sys.executable, "-c", OPENER, url]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    openers = [subprocess.Popen(command, cwd=ROOT, text=True, **pipes) for _ in range(4)]
    results = [opener.communicate() for opener in openers]
    assert [opener.returncode for opener in openers] == [0] * 4, results
    with Journal.open(url) as journal:
        assert {session.id for session in journal.list_sessions("acme")} == {out.strip() for out, _ in results}


def test_a_killed_migration_leaves_the_old_schema_or_the_new(tmp_path: Path) -> None:
    moments = random.Random(3)
    for attempt in range(5):
        url = f"sqlite:///{tmp_path}/{attempt}.db"
        opener = subprocess.Popen([sys.executable, "-c", OPENER, url], cwd=ROOT, stdout=subprocess.DEVNULL)
        while not (tmp_path / f"{attempt}.db").exists():
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.05))
        opener.send_signal(signal.SIGKILL)
        opener.wait()
        with Journal.open(url) as journal:
            journal.create_session("acme")
