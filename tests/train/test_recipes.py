"""KL replay keeps a model near its base where plain fine-tuning does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.conftest import QUICK
from train.decoder import Decoder
from train.packing import pack_rows
from train.recipes import make_recipe
from train.recipes.base import Materials
from train.recipes.sft_kl import divergence
from train.replay import ReplaySet, ReplaySize, replay_set
from train.rows import read_rows
from train.settings import RecipeName, TrainJob, TrainSettings, first_trained_layer

# TRL and transformers call their own deprecated functions.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SIZE = ReplaySize(4, 16, 4, 8)


@pytest.fixture(scope="module")
def replay_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replay")


def replay_kl(model: Any, replay: ReplaySet) -> float:
    """Mean KL(base || model) a token over all replay rows."""
    decoder = Decoder(model, 0)
    rows = [*replay.raw, *replay.chat]
    total = 0.0
    with torch.no_grad():
        for pack in pack_rows(rows, 1024):
            states = decoder.hidden(pack)
            for index, row in enumerate(pack.rows):
                assert row.replay is not None
                logits = decoder.logits(states[pack.target_positions(index)])
                total += divergence(logits, replay.top_ids[row.replay], replay.top_logprobs[row.replay]).item()
    return total / sum(row.targets for row in rows)


def trained(
    recipe: RecipeName, model: Any, tokenizer: Any, job: TrainJob, folder: Path, replay_dir: Path
) -> tuple[Any, list[float]]:
    """The PEFT model and the losses of its steps."""
    rows = read_rows(job.dataset, tokenizer, 1000).rows
    trainer = make_recipe(recipe).trainer(Materials(model, tokenizer, rows, QUICK, "base", replay_dir, folder, []))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer.model.eval(), losses


def test_kl_replay_stays_nearer_to_the_base(
    load_tiny: Callable[[], Any], tiny_tokenizer: Any, job: TrainJob, tmp_path: Path, replay_dir: Path
) -> None:
    replay = replay_set(load_tiny(), tiny_tokenizer, "base", SIZE, replay_dir)
    kept, kept_losses = trained("sft-kl", load_tiny(), tiny_tokenizer, job, tmp_path, replay_dir)
    plain, plain_losses = trained("sft", load_tiny(), tiny_tokenizer, job, tmp_path, replay_dir)
    assert plain_losses[-1] < plain_losses[0] / 2
    assert kept_losses[-1] < kept_losses[0]
    assert replay_kl(kept.get_base_model(), replay) < replay_kl(plain.get_base_model(), replay) / 2


def test_layers_below_are_untouched(
    load_tiny: Callable[[], Any], tiny_tokenizer: Any, job: TrainJob, tmp_path: Path, replay_dir: Path
) -> None:
    model, _ = trained("sft", load_tiny(), tiny_tokenizer, job, tmp_path, replay_dir)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names
    assert all(".layers.1." in name or ".layers.2." in name for name in names)
    base = load_tiny().state_dict()
    for name, tensor in model.get_base_model().state_dict().items():
        if "lora_" not in name:
            assert torch.equal(tensor, base[name.replace(".base_layer", "")]), name


def test_the_base_does_not_diverge_from_itself(
    load_tiny: Callable[[], Any], tiny_tokenizer: Any, replay_dir: Path
) -> None:
    model = load_tiny()
    replay = replay_set(model, tiny_tokenizer, "base", SIZE, replay_dir)
    assert len(replay.raw) == len(replay.chat) == 4
    assert abs(replay_kl(model, replay)) < 1e-3


def test_divergence_is_that_of_the_whole_distribution_when_all_tokens_are_kept() -> None:
    torch.manual_seed(0)
    base, model = torch.randn(3, 5), torch.randn(3, 5)
    top = base.log_softmax(-1).topk(5)
    expected = torch.nn.functional.kl_div(model.log_softmax(-1), base.log_softmax(-1), reduction="sum", log_target=True)
    assert divergence(model, top.indices, top.values).item() == pytest.approx(expected.item(), abs=1e-4)
    assert divergence(model, top.indices[:, :2], top.values[:, :2]).item() <= expected.item()


def test_replay_is_sampled_once_per_base(
    load_tiny: Callable[[], Any], tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_tiny()
    first = replay_set(model, tiny_tokenizer, "base", SIZE, tmp_path)
    (path,) = tmp_path.iterdir()
    written = path.stat().st_mtime_ns
    again = replay_set(None, tiny_tokenizer, "base", SIZE, tmp_path)  # no model needed: it is read
    assert path.stat().st_mtime_ns == written
    assert [row.token_ids.tolist() for row in again.raw] == [row.token_ids.tolist() for row in first.raw]
    assert torch.equal(torch.cat(again.top_logprobs), torch.cat(first.top_logprobs))
    replay_set(model, tiny_tokenizer, "another base", SIZE, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_damaged_replay_is_sampled_again(
    load_tiny: Callable[[], Any], tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = replay_set(load_tiny(), tiny_tokenizer, "base", SIZE, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    again = replay_set(load_tiny(), tiny_tokenizer, "base", SIZE, tmp_path)
    assert "damaged" in caplog.text
    assert torch.equal(torch.cat(again.top_ids), torch.cat(first.top_ids))


def test_first_trained_layer() -> None:
    assert first_trained_layer(TrainSettings(), 30) == 12
    assert first_trained_layer(TrainSettings(layers_from=0), 30) == 0
    with pytest.raises(ValueError, match="the model has 30 layers"):
        first_trained_layer(TrainSettings(layers_from=30), 30)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", math.inf),
        ("epochs", -1),
        ("rank", 0),
        ("batch_rows", 0),
        ("kl_weight", -0.1),
        ("max_seconds", 0),
        ("seed", -1),
        ("niceness", 20),
        ("unknown", 1),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        TrainSettings(**{name: value})
