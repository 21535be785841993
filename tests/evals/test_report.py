from __future__ import annotations

import json
from pathlib import Path

import pytest

from evals.gate import Decision, judge
from evals.report import render, summary, write
from evals.results import EvalResult
from evals.settings import GateSettings
from tests.evals.fakes import result

GUARDS = {"knowledge": [0.5, 0.6] * 60, "perplexity": [-2.0, -3.0] * 6, "format": [0.5, 1.0] * 15}
RESULT = result({"base": {"heldout": [0.0] * 40, **GUARDS}, "v2": {"heldout": [1.0] * 40, **GUARDS}})
DECISION = judge(RESULT, GateSettings())


def test_both_files_are_written_and_read_back(tmp_path: Path) -> None:
    markdown, machine = write(RESULT, DECISION, tmp_path / "new" / "folder")
    assert markdown.read_text() == render(RESULT, DECISION)
    loaded = json.loads(machine.read_text())
    assert Decision.model_validate(loaded["decision"]) == DECISION
    assert EvalResult.model_validate(loaded["result"]) == RESULT
    assert loaded["summary"]["v2"]["perplexity_ratio"] == pytest.approx(1.0)


def test_the_report_says_what_was_decided_and_from_what() -> None:
    text = render(RESULT, DECISION)
    assert text.startswith("# v2 against base: pass\n")
    for part in (*DECISION.reasons, "weights of v2", "heldout too long", "perplexity_ratio", "kvloop 0"):
        assert part in text


def test_what_people_wrote_cannot_break_the_tables() -> None:
    text = render(RESULT, DECISION)
    assert "what \\| \\<b\\>" in text
    assert "<b>" not in text


def test_an_evaluation_without_examples_is_reported() -> None:
    empty = result({"base": {"heldout": [], **GUARDS}, "v2": {"heldout": [], **GUARDS}})
    decision = judge(empty, GateSettings())
    assert decision.verdict == "inconclusive"
    assert "unknown" in render(empty, decision)
    assert "heldout" not in summary(empty)["base"]
