"""A retrain killed with `kill -9` inside or between its steps is found, resumed, and ends once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memory.journal import Journal, JournalSettings
from pipelines.registry import CHAMPION
from pipelines.retrain import interrupted_run
from tests.pipelines.fakes import FakeRegistry, Stages, teach

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 1.0
SCRIPT = """
import sys, time
from pathlib import Path
from memory.journal import Journal
from pipelines.lease import Busy
from pipelines.retrain import Retrain
from pipelines.settings import RetrainSettings
from tests.pipelines.fakes import FakeRegistry, Stages

folder = Path(sys.argv[1])
settings = RetrainSettings(folder=folder / "runs", min_examples=3, lease_seconds=1.0)
with Journal.open(f"sqlite:///{folder}/journal.db") as journal:
    stages = Stages(folder / "stages", die_at=sys.argv[2], for_real=True)
    job = Retrain(journal, FakeRegistry(folder, stages), settings, stages.train, stages.evaluate)
    while True:
        try:
            print(job.run().result)
            break
        except Busy:  # the dead process's lease has yet to run out
            time.sleep(0.1)
"""


def retrain(folder: Path, die_at: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), die_at]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("moment", ["before train", "after train", "after register", "after previous"])
def test_a_run_killed_at_a_step_is_resumed_by_the_next_process(tmp_path: Path, moment: str) -> None:
    url = f"sqlite:///{tmp_path}/journal.db"
    registry = FakeRegistry(tmp_path, Stages(tmp_path / "stages"))
    with Journal.open(url, JournalSettings(eval_share=0.5)) as journal:
        teach(journal, 3, "eval")
        teach(journal, 4)
        for number in range(2):
            registry.register(tmp_path, {}, {}, None, f"earlier {number}")
        registry.set_alias(CHAMPION, "1")
        (tmp_path / "stages" / "calls").unlink()
        killed = retrain(tmp_path, moment)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        time.sleep(LEASE_SECONDS)
        assert interrupted_run(journal) is not None
        resumed = retrain(tmp_path)
        assert (resumed.returncode, resumed.stdout) == (0, "promoted\n"), resumed.stderr
        (run,) = journal.list_runs()
        assert (run.status, run.attempts) == ("done", 2)
        calls = (tmp_path / "stages" / "calls").read_text().split()
        assert calls == ["trained", "evaluated", "registered", "previous=1", "champion=3"]
        assert [entry.to_version for entry in journal.list_promotions()] == ["3"]
