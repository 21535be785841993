"""The evaluation's report, for people (report.md) and for programs (report.json). Both files are written whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from evals.gate import Decision, MetricDecision
from evals.results import EvalResult, ModelScores, SuiteScores
from memory.files import write_atomic

MARKDOWN = "report.md"
JSON = "report.json"
_SHOWN_EXAMPLES = 5
_FORMAT = 1


def write(result: EvalResult, decision: Decision, folder: Path) -> tuple[Path, Path]:
    """Writes report.md and report.json into `folder`, which is made when missing, and gives both paths.

    report.json is {"format", "decision", "summary", "stale_kv", "result"}: every example's score of every model is in
    `result`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    markdown, machine = folder / MARKDOWN, folder / JSON
    whole = {
        "format": _FORMAT,
        "decision": decision.model_dump(mode="json"),
        "summary": summary(result),
        "stale_kv": result.stale_kv.model_dump(mode="json") if result.stale_kv else None,
        "result": result.model_dump(mode="json"),
    }
    write_atomic(markdown, render(result, decision).encode())
    write_atomic(machine, json.dumps(whole, ensure_ascii=False, indent=1).encode())
    return markdown, machine


def summary(result: EvalResult) -> dict[str, dict[str, float]]:
    """For each model, each suite's mean score and secondary score, and its perplexity ratio to the base model."""
    found: dict[str, dict[str, float]] = {}
    for model in result.models:
        values = found.setdefault(model.name, {})
        for suite in model.suites:
            for name, value in ((suite.suite, suite.mean), (f"{suite.suite} secondary", suite.secondary_mean)):
                if value is not None:
                    values[name] = value
        if any(suite.suite == "perplexity" for suite in model.suites):
            values["perplexity_ratio"] = result.perplexity_ratio(model.name)
    return found


def render(result: EvalResult, decision: Decision) -> str:
    """The report in Markdown."""
    title = f"# {result.candidate} against {result.champion}: {decision.verdict}"
    parts = [
        title,
        "\n".join(f"- {reason}" for reason in decision.reasons),
        "## Evidence",
        _evidence(decision),
        f"Differences are {result.candidate} minus the reference, errors clustered by session. The lower bound is one-"
        f"sided at the level given (Holm's correction of {decision.settings.alpha:g}) and must lie above the bar; the"
        f" upper bound is one-sided at {decision.settings.alpha:g}. Log-prob differences are in nats per token.",
        "## Scores",
        _scores(result.models),
        *_answers(result),
        "## KV of the version before",
        *_stale(result),
        "## How it was measured",
        _conditions(result, decision),
    ]
    return "\n\n".join(parts) + "\n"


def _evidence(decision: Decision) -> str:
    rows = [
        [
            metric.metric, metric.verdict, metric.reference, _number(metric.difference, "+.4f"),
            _number(metric.lower, "+.4f"), _number(metric.upper, "+.4f"), _number(metric.null, "+.4f"),
            _number(metric.p_value, ".2g"),
            _number(metric.p_adjusted, ".2g"), _number(metric.level, ".4f"), str(metric.examples), _clusters(metric),
        ]
        for metric in decision.metrics
    ]  # fmt: skip
    heads = ["metric", "verdict", "reference", "difference", "lower", "upper", "bar", "p", "p (Holm)", "level"]
    return _table([*heads, "examples", "sessions"], rows)


def _clusters(metric: MetricDecision) -> str:
    wanted = f" of about {metric.clusters_needed} needed" if metric.clusters_needed else ""
    return f"{metric.clusters}{wanted}"


def _scores(models: Sequence[ModelScores]) -> str:
    rows = []
    for suite in models[0].suites:
        rows.append([suite.suite, *(_number(model.suite(suite.suite).mean, ".4f") for model in models)])
        if suite.secondary_name:
            of_models = (_number(model.suite(suite.suite).secondary_mean, ".4f") for model in models)
            rows.append([f"{suite.suite}: {suite.secondary_name}", *of_models])
    return _table(["mean over examples", *(model.name for model in models)], rows)


def _answers(result: EvalResult) -> list[str]:
    """The held-out questions where the candidate differs most from the champion, in both directions."""
    candidate = next(suite for suite in result.model(result.candidate).suites if suite.role == "target")
    before = {example.id: example for example in result.model(result.champion).suite(candidate.suite).examples}
    changes = sorted(candidate.examples, key=lambda example: example.score - before[example.id].score)
    # The same example must not be shown as both: with few examples the halves meet in the middle.
    shown = min(_SHOWN_EXAMPLES, len(changes) // 2)
    worst = [example for example in changes[:shown] if example.score < before[example.id].score]
    best = [example for example in changes[::-1][:shown] if example.score > before[example.id].score]
    if not worst and not best:
        return []
    rows = [
        [
            _cell(example.details.get("question")), _cell(example.details.get("demonstration")),
            _cell(before[example.id].details.get("reply")), _cell(example.details.get("reply")),
            f"{before[example.id].score:.2f} to {example.score:.2f}",
        ]
        for example in [*best, *worst]
    ]  # fmt: skip
    heads = ["question", "demonstration", result.champion, result.candidate, "score"]
    return ["## Answers that changed most", _table(heads, rows)]


def _stale(result: EvalResult) -> list[str]:
    """What serving the candidate on the KV of what serves now would cost, and whether that is allowed."""
    stale = result.stale_kv
    if stale is None:
        return ["Not measured, so KV of other weights is never served under this version."]
    rows = [
        [
            group.kind, str(group.probes), str(group.tokens), _number(group.kl, ".5f"), _number(group.kl_p95, ".5f"),
            _number(group.top1, ".3f"), _number(group.answer_agreement, ".3f"), _number(group.noise_kl, ".5f"),
        ]
        for group in stale.groups
    ]  # fmt: skip
    heads = ["probes", "number", "tokens", "KL", "KL p95", "same top token", "same answer", "KL of noise alone"]
    verdict = "below" if stale.allowed else "not below"
    allowed = "may" if stale.allowed else "may not"
    return [
        _table(heads, rows),
        f"{stale.candidate} on KV that {stale.under} computed, against its own KV, in nats per token that follows. The"
        f" worst KL, {stale.kl:.5f}, is {verdict} the threshold of {stale.threshold:g}: policy `reuse` {allowed} serve"
        f" it.",
    ]


def _conditions(result: EvalResult, decision: Decision) -> str:
    lines = [
        f"- started {datetime.fromtimestamp(result.started_at, UTC).isoformat(timespec='seconds')},"
        f" took {result.seconds:.0f} s",
        *(_model_line(model) for model in result.models),
        *(f"- left out ({name.replace('_', ' ')}): {count}" for name, count in result.left_out.items() if count),
        "- versions: " + ", ".join(f"{name} {value}" for name, value in result.versions.items()),
        f"- examples: {', '.join(_suite_size(suite) for suite in result.models[0].suites)}",
        f"- evaluation settings: `{result.settings.model_dump_json()}`",
        f"- gate settings: `{decision.settings.model_dump_json()}`",
    ]
    return "\n".join(lines)


def _model_line(model: ModelScores) -> str:
    reused = f"; scored before: {', '.join(model.reused)}" if model.reused else ""
    return (
        f"- {model.name}: weights `{model.weights_id or 'unknown'}`, {model.prompt_tokens} prompt tokens,"
        f" {model.generated_tokens} generated, {model.seconds:.0f} s{reused}"
    )


def _suite_size(suite: SuiteScores) -> str:
    return f"{suite.suite} {len(suite.examples)} (digest {suite.digest[:12]})"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None or not math.isfinite(value) else format(value, form)


def _cell(value: object, most: int = 160) -> str:
    """Text that stays within one cell, whatever people or models wrote."""
    text = " ".join(str(value).split())
    text = text if len(text) <= most else text[: most - 3] + "..."
    for character in "\\`|<>[]":
        text = text.replace(character, "\\" + character)
    return text
