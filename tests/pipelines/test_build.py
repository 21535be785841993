"""The whole pipeline with the real trainer, evaluation and registry, on a tiny random model: nothing is learned, the
gate says so, and everything that should be kept is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evals.settings import EvalSettings, GateSettings
from memory.journal import Journal, JournalSettings
from pipelines.build import build_retrain
from pipelines.registry import CHAMPION, Registry
from pipelines.settings import RegistrySettings, RetrainSettings
from pipelines.stages import Event
from tests.pipelines.fakes import teach
from train.settings import TrainSettings

QUICK_TRAINING = TrainSettings(
    epochs=1, rank=2, replay_raw_rows=2, replay_raw_tokens=4, replay_chat_rows=2, replay_chat_tokens=4, threads=1
)
QUICK_EVALUATION = EvalSettings(heldout_examples=3, reply_tokens=4, knowledge_questions=3, text_tokens=32)


@pytest.mark.model
@pytest.mark.filterwarnings("default")  # MLflow and what it imports warn about themselves
def test_from_corrections_to_a_refused_version(tiny_model_dir: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    registry = Registry(RegistrySettings(folder=tmp_path / "mlflow"))
    settings = RetrainSettings(folder=tmp_path / "runs", min_examples=3)
    with Journal.open(f"sqlite:///{tmp_path}/journal.db", JournalSettings(eval_share=0.5)) as journal:
        taught = teach(journal, 4)
        teach(journal, 3, "eval")
        retrain = build_retrain(
            journal, registry, settings, tiny_model_dir, QUICK_TRAINING, QUICK_EVALUATION, GateSettings(), events.append
        )
        outcome = retrain.run()
        assert outcome.version == "1", outcome.reasons
        assert outcome.result in ("refused", "inconclusive")
        assert journal.trained_on("acme", taught[0])[1] == ("1",)
    version = registry.get_version("1")
    manifest = json.loads((version.path / "manifest.json").read_text())
    assert version.tags["dataset"] == manifest["dataset_digest"]
    assert version.tags["verdict"] == outcome.verdict
    assert (registry.report_path("1") / "report.md").is_file()
    assert registry.get_alias(CHAMPION) is None
    progressed = {event.step for event in events if event.kind == "progress"}
    assert progressed == {"train", "evaluate"}
    with registry._client() as client:
        (run,) = client.search_runs([registry._experiment(client)])
    assert {"base.heldout", "candidate.heldout", "candidate.perplexity_ratio"} <= {
        key.removeprefix("eval.") for key in run.data.metrics
    }
