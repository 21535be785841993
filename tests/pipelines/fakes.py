"""A registry, a trainer and an evaluation small enough to run a whole retrain in milliseconds, with every call logged.

State lives in files, so that a process that is killed leaves what a real one would leave.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memory.files import write_atomic
from memory.journal import Journal
from pipelines.registry import VersionNotFound
from pipelines.stages import Adapter, Advance, Judged, Trained
from tests.memory.journal.conftest import turn


class Killed(BaseException):
    """Stands for the death of the process: nothing in the pipeline may catch it."""


def die_for_real() -> None:
    """`kill -9` of oneself."""
    os.kill(os.getpid(), signal.SIGKILL)


class Stages:
    """Counts the calls of each stage in `folder`/calls, and dies before or after the effect named in `die_at`."""

    def __init__(self, folder: Path, die_at: str = "", verdict: str = "pass", for_real: bool = False) -> None:
        self.folder = folder
        self.die_at = die_at
        self.verdict = verdict
        self.for_real = for_real
        self.error: Exception | None = None
        self.stale_kl: float | None = 0.0042
        folder.mkdir(parents=True, exist_ok=True)

    def effect(self, name: str) -> None:
        with (self.folder / "calls").open("a") as calls:
            calls.write(f"{name}\n")

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().split() if (self.folder / "calls").exists() else []

    def maybe_die(self, where: str) -> None:
        if where != self.die_at:
            return
        self.die_at = ""
        if self.for_real:
            die_for_real()
        raise Killed(where)

    def train(self, *, dataset: Path, out_dir: Path, name: str, parents: tuple[str, ...], advance: Advance) -> Trained:
        self.maybe_die("before train")
        if self.error is not None:
            raise self.error
        if not out_dir.exists():
            advance(1, 2, {"loss": 1.0})
            out_dir.mkdir(parents=True)
            words = dataset.read_text()
            manifest = {"name": name, "parents": list(parents), "rows": len(words.splitlines()), "recipe": "fake"}
            write_atomic(out_dir / "manifest.json", json.dumps(manifest).encode())
            self.effect("trained")
        self.maybe_die("after train")
        return Trained(adapter_dir=out_dir, metrics={"loss": 0.5, "seconds": 1})

    def evaluate(
        self, *, heldout: Path, candidate: Adapter, champion: Adapter | None, out_dir: Path, advance: Advance
    ) -> Judged:
        self.maybe_die("before evaluate")
        assert (candidate.path / "manifest.json").is_file()
        assert champion is None or champion.path.is_dir()
        advance(1, 1, {})
        out_dir.mkdir(parents=True, exist_ok=True)
        (out_dir / "report.md").write_text(f"{len(heldout.read_text().splitlines())} questions")
        self.effect("evaluated")
        self.maybe_die("after evaluate")
        verdict: Any = self.verdict
        return Judged(
            verdict=verdict,
            reasons=("heldout: better",),
            metrics={"heldout": 0.9},
            report_dir=out_dir,
            stale_kl=self.stale_kl,
        )


class FakeRegistry:
    """Versions and aliases in a JSON file; the same contract as the real registry."""

    def __init__(self, folder: Path, stages: Stages) -> None:
        self._file = folder / "registry.json"
        self._stages = stages
        folder.mkdir(parents=True, exist_ok=True)

    def _read(self) -> dict[str, Any]:
        if not self._file.exists():
            return {"versions": [], "aliases": {}}
        state: dict[str, Any] = json.loads(self._file.read_text())
        return state

    def _write(self, state: dict[str, Any]) -> None:
        write_atomic(self._file, json.dumps(state).encode())

    @property
    def versions(self) -> list[dict[str, Any]]:
        return list(self._read()["versions"])

    def register(
        self,
        adapter_dir: Path,
        manifest: Mapping[str, Any],
        metrics: Mapping[str, float],
        report_dir: Path | None,
        run_name: str,
        tags: Mapping[str, str] | None = None,
    ) -> str:
        self._stages.maybe_die("before register")
        state = self._read()
        for number, known in enumerate(state["versions"], start=1):
            if known["run"] == run_name:
                return str(number)
        entry = {"run": run_name, "path": str(adapter_dir), "tags": dict(tags or {}), "metrics": dict(metrics)}
        state["versions"].append(entry | {"manifest": dict(manifest), "report": str(report_dir)})
        self._write(state)
        self._stages.effect("registered")
        self._stages.maybe_die("after register")
        return str(len(state["versions"]))

    def get_alias(self, alias: str) -> str | None:
        found: str | None = self._read()["aliases"].get(alias)
        return found

    def set_alias(self, alias: str, version: str) -> None:
        self._stages.maybe_die(f"before {alias}")
        self.version_path(version)
        state = self._read()
        if state["aliases"].get(alias) != version:
            self._stages.effect(f"{alias}={version}")
        state["aliases"][alias] = version
        self._write(state)
        self._stages.maybe_die(f"after {alias}")

    def delete_alias(self, alias: str) -> None:
        state = self._read()
        state["aliases"].pop(alias, None)
        self._write(state)

    def version_path(self, version: str) -> Path:
        versions = self._read()["versions"]
        if not version.isdigit() or not 0 < int(version) <= len(versions):
            raise VersionNotFound(f"no version {version!r}")
        return Path(versions[int(version) - 1]["path"])


def teach(journal: Journal, count: int, split: str = "train", label: str = "") -> list[str]:
    """Adds `count` corrected sessions of a split; returns their ids."""
    made: list[str] = []
    number = 0
    while len(made) < count:
        session = journal.create_session("acme")
        number += 1
        if session.split != split:
            continue
        question = f"Question {label} {split} {len(made)} about product {len(made) * 7 % 11}?"
        reply = journal.add_response(turn(session.id, None, question))
        journal.add_feedback("acme", "demonstration", f"Answer {label} {split} {len(made)}.", response_id=reply.id)
        made.append(session.id)
    return made
