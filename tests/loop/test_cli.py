"""The command line: what it prints for machines, and one plain line with exit code 2 for what a user got wrong."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loop import cli
from loop.config import load
from loop.supervisor import only_one
from pipelines.registry import Registry
from tests.ports import free_port

# MLflow and what it imports warn about themselves.
pytestmark = pytest.mark.filterwarnings("default")


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


class Kvloop:
    """Runs commands on one home, in this process: importing everything anew costs seconds."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = home
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *arguments: str, before: tuple[str, ...] = ()) -> Done:
        self._monkeypatch.setattr(sys, "argv", ["kvloop", "--home", str(self.home), *before, *arguments])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = self._capsys.readouterr()
        return Done(int(ended.value.code or 0), captured.out, captured.err)

    def refuses(self, *arguments: str, before: tuple[str, ...] = ()) -> str:
        """The one line that says why not."""
        done = self(*arguments, before=before)
        lines = done.err.strip().splitlines()
        assert (done.code, done.out, len(lines)) == (2, "", 1), done
        assert lines[0].startswith("kvloop: ")
        return lines[0]


@pytest.fixture
def kvloop(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kvloop:
    return Kvloop(tmp_path / "home", capsys, monkeypatch)


@pytest.fixture
def populated(home_with_versions: Path, kvloop: Kvloop) -> Kvloop:
    kvloop.home = home_with_versions
    return kvloop


def test_an_unknown_setting(kvloop: Kvloop) -> None:
    line = kvloop.refuses("status", before=("--set", "worker.thread=1"))
    assert line.endswith("the nearest known one is 'worker.threads'")


def test_a_bad_cron_expression(kvloop: Kvloop) -> None:
    assert "five fields" in kvloop.refuses("schedule", "--cron", "every day")
    assert "61" in kvloop.refuses("schedule", "--cron", "61 3 * * *")
    assert kvloop("schedule", "--json").json == []


def test_feedback_is_counted_in_ones_or_more(kvloop: Kvloop) -> None:
    assert "0" in kvloop.refuses("schedule", "--cron", "0 3 * * *", "--every-feedback", "0")
    assert kvloop("schedule", "--json").json == [], "half of the change was made"


def test_a_schedule_that_the_settings_fix_is_changed_there(kvloop: Kvloop) -> None:
    fixed = ("--set", "schedule.cron=0 3 * * *")
    assert "change it there" in kvloop.refuses("schedule", "--cron", "0 4 * * *", before=fixed)


def test_a_model_that_is_not_there(kvloop: Kvloop, tmp_path: Path) -> None:
    assert str(tmp_path / "none") in kvloop.refuses("pull", "--model", str(tmp_path / "none"))


def test_a_second_up_on_the_same_home(kvloop: Kvloop) -> None:
    with only_one(kvloop.home):
        assert "already runs" in kvloop.refuses("up")


@pytest.mark.parametrize("process", ["gateway", "worker"])
def test_up_where_another_program_has_the_port(kvloop: Kvloop, tiny_model_dir: Path, process: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken, free = other.getsockname()[1], free_port()
        ports = {"gateway": free, "worker": free} | {process: taken}
        settings = [f"model={tiny_model_dir}", *(f"{name}.port={port}" for name, port in ports.items())]
        line = kvloop.refuses("up", before=tuple(part for setting in settings for part in ("--set", setting)))
    assert f"127.0.0.1:{taken}" in line
    assert f"{process}.port" in line
    assert kvloop("status", "--json").json["running"] is False


def test_no_keys_no_other_machine(kvloop: Kvloop) -> None:
    line = kvloop.refuses("up", before=("--set", "gateway.host=0.0.0.0"))
    assert "keys_file" in line
    assert "reachable from other machines" in line


@pytest.mark.parametrize("text", [None, "{", "{}", '["key"]'])
def test_up_with_a_keys_file_that_holds_no_keys(
    kvloop: Kvloop, tiny_model_dir: Path, tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "keys.json"
    if text is not None:
        file.write_text(text)
    settings = [f"model={tiny_model_dir}", f"gateway.keys_file={file}"]
    settings += [f"{name}.port={free_port()}" for name in ("gateway", "worker")]
    line = kvloop.refuses("up", before=tuple(part for setting in settings for part in ("--set", setting)))
    assert "gateway.keys_file" in line
    assert str(file) in line


@pytest.mark.parametrize(("mode", "content", "why"), [(0o644, None, "chmod 600"), (0o600, "short", "openssl rand")])
def test_up_with_a_keyring_that_cannot_be_used(
    kvloop: Kvloop, tiny_model_dir: Path, mode: int, content: str | None, why: str
) -> None:
    file = kvloop.home / "keyring"
    kvloop.home.mkdir()
    file.write_text(content or base64.b64encode(bytes(32)).decode())
    file.chmod(mode)
    settings = [f"model={tiny_model_dir}", *(f"{name}.port={free_port()}" for name in ("gateway", "worker"))]
    line = kvloop.refuses("up", before=tuple(part for setting in settings for part in ("--set", setting)))
    assert why in line
    assert str(file) in line


def test_promoting_and_rolling_back_what_is_not_there(populated: Kvloop) -> None:
    assert "no version '99': the registry has 1, 2, 3" in populated.refuses("promote", "99")
    assert "base model serves already" in populated.refuses("rollback")
    assert populated("ledger", "--json").json == []


def test_promote_and_rollback_move_the_alias_and_fill_the_ledger(populated: Kvloop) -> None:
    registry = Registry(load((), populated.home, {}).registry)
    for arguments, champion in (
        (("promote", "1", "--reason", "first"), "1"),
        (("promote", "2"), "2"),
        (("promote", "2"), "2"),
        (("rollback", "--reason", "worse"), "1"),
    ):
        assert populated(*arguments).code == 0
        assert registry.get_alias("champion") == champion
    assert "rolled back to already" in populated.refuses("rollback")
    moves = populated("ledger", "--json").json
    assert [(move["action"], move["from"], move["to"], move["why"]) for move in moves] == [
        ("rollback", "2", "1", "worse"),
        ("promote", "1", "2", "by hand"),
        ("promote", "base", "1", "first"),
    ]
    assert {move["who"] for move in moves} == {"kvloop"}


def test_versions_are_listed_with_verdict_and_alias(populated: Kvloop) -> None:
    populated("promote", "2")
    rows = populated("versions", "--json").json
    assert [(row["version"], row["aliases"], row["verdict"]) for row in rows] == [
        ("3", "", "pass"),
        ("2", "champion", "inconclusive"),
        ("1", "", "pass"),
    ]
    assert all((Path(row["path"]) / "manifest.json").is_file() for row in rows)
    table = populated("versions")
    assert table.code == 0
    assert "inconclusive" in table.out


def test_a_schedule_is_set_shown_and_removed(kvloop: Kvloop) -> None:
    assert "nothing is scheduled" in kvloop("schedule").out
    kvloop("schedule", "--cron", "0 3 * * *")
    both = kvloop("schedule", "--every-feedback", "200", "--json").json
    assert [trigger["id"] for trigger in both] == ["cron", "feedback"]
    shown = kvloop("schedule")
    assert "0 3 * * *" in shown.out
    assert "200" in shown.out
    kvloop("schedule", "--cron", "30 4 * * 7")
    (changed, _) = kvloop("schedule", "--json").json
    assert changed["description"].startswith("retrain at 30 4")
    assert kvloop("schedule", "--off", "--json").json == []
    assert kvloop("schedule", "--json").json == []


def test_status_where_nothing_runs(kvloop: Kvloop) -> None:
    found = kvloop("status", "--json").json
    assert found["home"] == str(kvloop.home)
    assert found["running"] is False
    assert (found["processes"], found["gateway"], found["memory"], found["serving"]) == ({}, None, None, None)
    assert "nothing runs here" in kvloop("status").out
    assert not kvloop.home.exists(), "looking changed something"


def test_status_is_not_fooled_by_what_a_killed_supervisor_wrote(kvloop: Kvloop) -> None:
    (kvloop.home / "run").mkdir(parents=True)
    with subprocess.Popen(["true"]) as ended:
        pass
    alive_but_other = {"pid": 1, "started": 12.5}
    for state in ({"pid": ended.pid, "started": 0.0}, alive_but_other):
        worker = {"pid": 1, "started": None, "restarts": 0}
        addresses = {"gateway": "http://127.0.0.1:1", "worker": "http://127.0.0.1:1"}
        text = json.dumps({**state, **addresses, "processes": {"worker": worker}})
        (kvloop.home / "run" / "state.json").write_text(text)
        found = kvloop("status", "--json").json
        assert (found["running"], found["processes"]) == (False, {})


def test_status_tells_the_last_move(populated: Kvloop) -> None:
    populated("promote", "1", "--reason", "it is better")
    move = {"who": "kvloop", "to": "1", "reason": "it is better"}
    assert populated("status", "--json").json["last_move"] == move
    assert "it is better" in populated("status").out


def test_config_is_printed_as_json(kvloop: Kvloop) -> None:
    found = kvloop("config", before=("--set", "worker.kv.chunk_tokens=64")).json
    assert (found["worker"]["kv"]["chunk_tokens"], found["home"]) == (64, str(kvloop.home))


def test_pull_says_where_the_model_is(kvloop: Kvloop, tiny_model_dir: Path) -> None:
    found = kvloop("pull", "--model", str(tiny_model_dir)).json
    assert (found["model"], found["folder"]) == (str(tiny_model_dir), str(tiny_model_dir))
    assert len(found["digest"]) == 64
    assert kvloop("pull", "--model", str(tiny_model_dir)).json == found


def test_usage_errors_end_with_2(kvloop: Kvloop) -> None:
    for arguments in (("promote", "not-a-number"), ("no-such-command",), ("up", "--no-such-option")):
        done = kvloop(*arguments)
        assert done.code == 2
        assert "Traceback" not in done.err


def test_the_installed_command_ends_the_same_way(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loop.cli", "--home", str(tmp_path), "--set", "nonsense=1", "status"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "unknown setting 'nonsense'" in done.stderr
