"""The decoder computes what Hugging Face's forward computes, however its tokens are cut and mixed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from serve.engine.config import read_config
from serve.engine.errors import UnsupportedModel, WeightsError
from serve.engine.linear import Linear
from serve.engine.model import Decoder, Run
from serve.engine.weights import load_decoder
from tests.serve.tiny import VARIANTS, load_reference, prompt, reference_logits

TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}


def compute(decoder: Decoder, token_ids: tuple[int, ...], cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of every token and the KV, computed in pieces that end at `cuts`."""
    kv = decoder.new_kv(len(token_ids))
    pieces = []
    with torch.inference_mode():
        for first, last in zip([0, *cuts], [*cuts, len(token_ids)], strict=True):
            pieces.append(decoder.logits(decoder.forward([Run(token_ids[first:last], first, kv)])))
    return torch.cat(pieces), kv


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_hugging_face(tiny_models: Callable[[str], Path], variant: str) -> None:
    folder = tiny_models(variant)
    token_ids = prompt(300)
    expected = reference_logits(load_reference(folder), token_ids)
    decoder = load_decoder(folder, torch.float32)

    whole, kv = compute(decoder, token_ids, [])
    torch.testing.assert_close(whole, expected, **TOLERANCE)

    chunked, chunked_kv = compute(decoder, token_ids, [1, 37, 165, 166, 298, 299])
    torch.testing.assert_close(chunked, expected, **TOLERANCE)
    torch.testing.assert_close(chunked_kv, kv, **TOLERANCE)


@pytest.mark.parametrize("variant", ["llama", "mistral-window"])
def test_runs_of_several_sequences_do_not_touch_each_other(tiny_models: Callable[[str], Path], variant: str) -> None:
    decoder = load_decoder(tiny_models(variant), torch.float32)
    prompts = [prompt(40, 1), prompt(7, 2), prompt(130, 3)]
    alone = [compute(decoder, each, [len(each) - 1])[0] for each in prompts]
    buffers = [decoder.new_kv(200) for _ in prompts]
    with torch.inference_mode():
        first = decoder.forward([Run(each[:-1], 0, kv) for each, kv in zip(prompts, buffers, strict=True)])
        last = decoder.forward([Run(each[-1:], len(each) - 1, kv) for each, kv in zip(prompts, buffers, strict=True)])
        together = decoder.logits(first).split([len(each) - 1 for each in prompts])
        together_last = decoder.logits(last)
    for index, expected in enumerate(alone):
        torch.testing.assert_close(
            torch.cat((together[index], together_last[index : index + 1])), expected, **TOLERANCE
        )


def test_prepacked_weights_come_back_bit_for_bit() -> None:
    weight = torch.randn(96, 64, dtype=torch.bfloat16)
    linear = Linear(weight.clone(), torch.randn(96, dtype=torch.bfloat16))
    assert torch.equal(linear.dense(), weight)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(x.float(), weight.float(), linear.bias.float())
    torch.testing.assert_close(linear(x).float(), expected, rtol=2e-2, atol=2e-2)


def test_context_can_be_shortened(tiny_model: Path) -> None:
    assert load_decoder(tiny_model, torch.float32, context=64).context == 64
    assert load_decoder(tiny_model, torch.float32, context=10**6).context == 512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, tiny_model: Path, change: dict[str, object], message: str
) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModel, match=message):
        read_config(tmp_path)


def test_old_spelling_of_rope_is_read(tmp_path: Path, tiny_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rope = read_config(tmp_path).rope
    assert (rope.kind, rope.theta, rope.factor) == ("linear", 5e5, 2.0)


def test_folders_that_do_not_fit_their_config_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    for change, message in (({"num_hidden_layers": 2}, "ignore"), ({"num_hidden_layers": 4}, "no tensor")):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(WeightsError, match=message):
            load_decoder(folder, torch.float32)
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 50}))
    with pytest.raises(WeightsError, match="shape"):
        load_decoder(folder, torch.float32)


def test_damaged_and_pickled_weights_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    torch.save({"model.embed_tokens.weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="never loaded"):
        load_decoder(tmp_path, torch.float32)
    whole = (tiny_model / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match="damaged"):
        load_decoder(tmp_path, torch.float32)
    with pytest.raises(WeightsError, match=r"config\.json"):
        load_decoder(tmp_path / "nowhere", torch.float32)
