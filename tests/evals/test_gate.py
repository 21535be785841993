from __future__ import annotations

import math

import numpy as np
import pytest

from evals.gate import Decision, decide, judge
from evals.settings import GateSettings
from tests.evals.fakes import guards, paired, result

SETTINGS = GateSettings()
BEFORE = [0.0] * 40
AFTER = [1.0] * 36 + [0.0] * 4


def test_a_gain_without_losses_passes() -> None:
    decision = decide(paired(BEFORE, AFTER), guards(), SETTINGS)
    assert decision.verdict == "pass"
    assert decision.passed
    assert all(metric.lower is not None and metric.lower > metric.null for metric in decision.metrics)
    assert all(metric.p_adjusted <= SETTINGS.alpha for metric in decision.metrics)


@pytest.mark.parametrize("kind", ["knowledge", "perplexity", "format"])
def test_a_loss_beyond_the_margin_fails_whatever_the_gain(kind: str) -> None:
    decision = decide(paired(BEFORE, AFTER), guards(2.5 * SETTINGS.margin(kind), kind), SETTINGS)
    assert decision.verdict == "fail"
    assert decision.reasons[0].startswith(f"{kind}: ")
    assert "worse than the" in decision.reasons[0]


def test_no_gain_on_much_data_fails() -> None:
    random = np.random.default_rng(3)
    scores = random.uniform(0.2, 0.8, 2000)
    decision = decide(
        paired(scores.tolist(), (scores + random.normal(0, 0.1, 2000)).clip(0, 1).tolist()), guards(), SETTINGS
    )
    assert decision.verdict == "fail"
    assert "less than the smallest gain worth a swap" in decision.reasons[0]


def test_a_small_gain_on_little_data_is_inconclusive_and_says_how_much_is_missing() -> None:
    decision = decide(paired([0.0] * 20, [1.0] * 2 + [0.0] * 18), guards(), SETTINGS)
    assert decision.verdict == "inconclusive"
    needed = decision.metrics[0].clusters_needed
    assert needed is not None
    assert f"about {needed - 20} more sessions" in decision.reasons[0]


@pytest.mark.parametrize("examples", [0, 1, 7, 9])
def test_too_little_data_never_passes(examples: int) -> None:
    decision = decide(paired([0.0] * examples, [1.0] * examples), guards(), SETTINGS)
    assert decision.verdict == "inconclusive"
    assert "too little data" in decision.reasons[0]


def test_many_examples_of_few_sessions_never_pass() -> None:
    clusters = [number % 7 for number in range(700)]
    decision = decide(paired([0.0] * 700, [1.0] * 700, clusters=clusters), guards(), SETTINGS)
    assert decision.verdict == "inconclusive"


def test_a_missing_guard_never_passes() -> None:
    decision = decide(paired(BEFORE, AFTER), guards()[:2], SETTINGS)
    assert decision.verdict == "inconclusive"
    assert decision.reasons[0] == "format: this required guard was not measured"


def test_a_guard_on_little_data_never_passes() -> None:
    knowledge = paired([0.5] * 6, [0.5] * 6, metric="knowledge", kind="knowledge")
    assert decide(paired(BEFORE, AFTER), [knowledge, *guards()[1:]], SETTINGS).verdict == "inconclusive"


def test_levels_follow_holm_and_more_guards_ask_for_more() -> None:
    of_user = [paired([0.5] * 60, [0.5] * 60, metric=f"file:{number}", kind="file") for number in range(6)]
    few = decide(paired(BEFORE, AFTER), guards(), SETTINGS)
    many = decide(paired(BEFORE, AFTER), [*guards(), *of_user], SETTINGS)
    assert sorted(metric.level for metric in few.metrics) == pytest.approx([0.025 / 4, 0.025 / 3, 0.025 / 2, 0.025])
    assert min(metric.level for metric in many.metrics) == pytest.approx(0.025 / 10)
    assert many.metrics[0].p_adjusted >= few.metrics[0].p_adjusted


def test_perplexity_is_judged_as_a_ratio() -> None:
    settings = GateSettings(perplexity_ratio=1.2)
    assert settings.margin("perplexity") == pytest.approx(math.log(1.2))
    accepted = decide(paired(BEFORE, AFTER), guards(math.log(1.1), "perplexity"), settings)
    assert accepted.verdict == "pass"
    assert any("perplexity x 1.1" in reason for reason in accepted.reasons)


def test_a_guard_of_unknown_kind_is_refused() -> None:
    with pytest.raises(KeyError, match="poetry"):
        decide(paired(BEFORE, AFTER), [paired(BEFORE, BEFORE, kind="poetry")], SETTINGS)


@pytest.mark.parametrize("size", [0, 12, 40])
def test_a_decision_is_json(size: int) -> None:
    decision = decide(paired([0.0] * size, [1.0] * size), guards(), SETTINGS)
    assert Decision.model_validate_json(decision.model_dump_json()) == decision


def test_an_evaluation_is_judged_against_champion_and_base() -> None:
    same = {"knowledge": [0.5, 0.6] * 60, "perplexity": [-2.0, -3.0] * 6, "format": [0.5, 1.0] * 15}
    decision = judge(result({"base": {"heldout": BEFORE, **same}, "v2": {"heldout": AFTER, **same}}), SETTINGS)
    assert decision.verdict == "pass"
    assert [metric.role for metric in decision.metrics] == ["target", "guard", "guard", "guard"]


def test_reasons_are_plain_words() -> None:
    decision = decide(paired(BEFORE, AFTER), guards(), SETTINGS)
    assert decision.reasons[0].startswith("heldout: v2 against base: +90.0 points, at worst +")
    assert decision.reasons[0].endswith("; the gain is proven")
    assert all(reason.endswith(" that is accepted") for reason in decision.reasons[1:])
