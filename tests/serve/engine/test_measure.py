"""Measuring: what reacts is found by gradients that are right; every rung gets a record; the text is disjoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from memory.kv.codec.compact_rotation import cos_sin, rotate, turns_of
from memory.kv.codec.factory import Codecs
from memory.kv.fidelity import RUNGS, FidelityRecords
from serve.engine.bands import kv_bands
from serve.engine.divergence import prefill
from serve.engine.errors import EngineError
from serve.engine.measure import bundled_texts, cut, measure, tokenizer_of
from serve.engine.model import Decoder
from serve.engine.rope import inverse_frequencies
from serve.engine.sensitivity import _logits, _outer, fisher
from serve.engine.versions import Version
from serve.engine.weights import load_decoder
from tests.serve.tiny import VARIANTS, VOCABULARY, prompt


def encode(text: str) -> Sequence[int]:
    """A tokenizer of bytes; the tiny models read no words anyway."""
    return [3 + byte % (VOCABULARY - 3) for byte in text.encode()[:3000]]


def version_of(folder: Path) -> Version:
    return Version("base", folder, "base-digest", "fp32", load_decoder(folder, torch.float32))


def turns(decoder: Decoder) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return turns_of(inverse_frequencies(decoder.config.rope, decoder.config.head_dim).numpy().astype(np.float64))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_forward_with_gradients_is_the_decoders(tiny_models: Callable[[str], Path], variant: str) -> None:
    decoder, text = load_decoder(tiny_models(variant), torch.float32), prompt(90)
    kv = decoder.new_kv(90)
    with torch.inference_mode():
        prefill(decoder, text[:60], 0, kv)
        expected = decoder.logits(prefill(decoder, text[60:], 60, kv))
    found = _logits(decoder, text[60:], 60, kv[:, :, :, :60].clone())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_information_predicts_the_divergence_of_small_errors(tiny_model: Path) -> None:
    """d^T F d / 2 against the KL that errors of independent tokens do: F is the model's reaction, not a guess."""
    decoder, prefix = load_decoder(tiny_model, torch.float32), 80
    layers, width = decoder.config.layers, decoder.config.kv_heads * decoder.config.head_dim
    information, expected, measured = np.zeros((layers, 2, width, width)), 0.0, 0.0
    rng = np.random.default_rng(0)
    for seed in range(6):
        text = prompt(200, seed)
        kv = decoder.new_kv(200)
        with torch.inference_mode():
            prefill(decoder, text[:prefix], 0, kv)
            exact = decoder.logits(prefill(decoder, text[prefix:], prefix, kv)).log_softmax(-1)
        information += fisher(decoder, text, kv[:, :, :, :prefix], turns(decoder), range(layers), (0, 0), seed) / 6
        for _ in range(8):
            error = torch.from_numpy(rng.standard_normal(kv[:, :, :, :prefix].shape) * 0.01).float()
            other = kv.clone()
            other[:, :, :, :prefix] += error
            with torch.inference_mode():
                changed = decoder.logits(prefill(decoder, text[prefix:], prefix, other)).log_softmax(-1)
            measured += float((exact.exp() * (exact - changed)).sum(-1).mean()) / 48
    # Independent errors of variance v: E[d^T F d] = v tr F, whatever the rotation. The trace is summed over positions.
    expected = 0.01**2 * float(np.trace(information, axis1=-2, axis2=-1).sum()) / 2
    assert measured == pytest.approx(expected, rel=0.35)


def test_keys_are_seen_without_their_rotation() -> None:
    """Gradients that point one way before rotation are one direction, wherever their tokens stand."""
    rng = np.random.default_rng(0)
    direction = rng.standard_normal((2, 1, 8)).astype(np.float32)
    frequencies = turns_of(1.0 / 10000.0 ** (np.arange(0, 8, 2) / 8))
    gradient = np.empty((1, 2, 2, 50, 8), np.float32)
    gradient[0, 0] = rotate(np.repeat(direction, 50, axis=1), *cos_sin(frequencies, 0, 50))
    gradient[0, 1] = direction
    information = _outer(gradient, frequencies, 5, 50)
    flat = direction.reshape(-1).astype(np.float64)
    for part in information[0]:
        np.testing.assert_allclose(part, 45 * np.outer(flat, flat), rtol=1e-4, atol=1e-4)


def test_every_rung_gets_a_record_and_compact_a_basis(tmp_path: Path, tiny_model: Path) -> None:
    version, codecs, records = version_of(tiny_model), Codecs(tmp_path / "bases"), FidelityRecords(tmp_path / "records")
    found = {record.codec: record for record in measure(version, codecs, records, encode)}
    assert tuple(found) == RUNGS
    assert [record.codec for record in records.all()] == list(RUNGS)
    assert found["exact"].kl_mean == 0.0
    assert found["exact"].kl_mean <= found["int8"].kl_mean < found["int4"].kl_mean
    weights = [found[rung].bytes_per_token for rung in RUNGS]
    assert weights == sorted(weights, reverse=True)
    raw = version.decoder.kv_bytes_per_token
    for record in found.values():
        assert record.weights_id_base == "base-digest"
        assert record.ratio == pytest.approx(raw / record.bytes_per_token)
        assert record.tokens > 1000
        assert record.noise_kl >= 0.0
    (band,) = kv_bands(version, "")
    assert codecs.encoder("compact", band.identity.model_digest()) is not None


def test_a_basis_that_is_there_is_kept(tmp_path: Path, tiny_model: Path) -> None:
    version, codecs, records = version_of(tiny_model), Codecs(tmp_path / "bases"), FidelityRecords(tmp_path / "records")
    first = measure(version, codecs, records, encode)
    paths = sorted((tmp_path / "bases").iterdir())
    again = measure(version, codecs, records, encode)
    assert sorted((tmp_path / "bases").iterdir()) == paths
    assert [record.kl_mean for record in again] == [record.kl_mean for record in first]


def test_bands_are_calibrated_apart(tmp_path: Path, tiny_model: Path) -> None:
    from dataclasses import replace

    plain = version_of(tiny_model)
    version = replace(plain, decoder=replace(plain.decoder, shared_layers=1))
    codecs, records = Codecs(tmp_path / "bases"), FidelityRecords(tmp_path / "records")
    found = measure(version, codecs, records, encode)
    assert len(list((tmp_path / "bases").iterdir())) == len(kv_bands(version, "")) == 2
    assert found[-1].codec == "compact"
    assert found[-1].kl_mean > 0


def test_the_texts_are_of_several_kinds_and_disjoint() -> None:
    calibration, measured = bundled_texts("calibrate"), bundled_texts("measure")
    assert set(calibration) == set(measured) == {"code", "dialogue", "docs", "lists", "prose"}
    lines = {line for text in calibration.values() for line in text.splitlines() if len(line) > 60}
    assert not lines & {line for text in measured.values() for line in text.splitlines()}


def test_windows_fit_the_context() -> None:
    windows = cut(encode, {"a": "x" * 2000, "b": "y" * 1500}, 512, 1024, 512)
    assert [len(each) for each in windows.prompts] == [512] * 6
    assert windows.prefix == 341
    with pytest.raises(EngineError, match="too short"):
        cut(encode, {"a": "x" * 2000}, 32, 1024, 512)


def test_a_model_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        tokenizer_of(tmp_path)


@pytest.mark.model
@pytest.mark.slow
def test_the_bundled_model_keeps_what_is_promised(tmp_path: Path, model_dir: Path) -> None:
    decoder = load_decoder(model_dir, torch.bfloat16)
    version = Version("base", model_dir, "digest", "bf16", decoder)
    records = FidelityRecords(tmp_path / "records")
    found = {each.codec: each for each in measure(version, Codecs(tmp_path), records, tokenizer_of(model_dir))}
    assert found["int8"].kl_mean <= 0.003
    assert found["int4"].kl_mean <= 0.008
    assert found["compact"].kl_mean <= 0.05
    assert found["compact"].ratio >= 8
