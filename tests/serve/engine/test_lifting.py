"""A promotion keeps the KV below the first trained layer: it is found under the same keys, and lifted exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memory.kv.cost import CostModel
from memory.kv.identity import Chain
from memory.kv.match import Match
from memory.kv.settings import KVSettings
from serve.engine.bands import entering_band, kv_bands
from serve.engine.engine import Engine
from serve.engine.model import Decoder, Run
from serve.engine.request import Completion, KVOptions, Request, Sampling
from tests.serve.tiny import build_adapter, prompt

StartEngine = Callable[..., Engine]
SHARED = 1
CHUNK = 32
PREFILL = 64
SETTINGS = KVSettings(chunk_tokens=CHUNK, min_tokens=4, disk_reserve_bytes=0, upkeep_seconds=0)
GREEDY = Sampling(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
LONG = prompt(300)


@dataclass(frozen=True)
class Adapters:
    """Two that leave the shared layers alone, and one that does not."""

    first: Path
    second: Path
    deep: Path


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Adapters:
    root = tmp_path_factory.mktemp("lifting")
    return Adapters(
        build_adapter(root / "first", tiny_model, seed=1, layers_to_transform=[1, 2]),
        build_adapter(root / "second", tiny_model, seed=2, layers_to_transform=[2]),
        build_adapter(root / "deep", tiny_model, seed=3, layers_to_transform=[0, 2]),
    )


def everything(self: CostModel, match: Match, total: int, beside: Match | None = None) -> int:
    return match.tokens


@pytest.fixture
def start(
    start_engine: StartEngine, tmp_path: Path, adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> StartEngine:
    """Starts engines on one folder with all adapters, which load and lift whatever they find."""
    monkeypatch.setattr(CostModel, "tokens_to_load", everything)
    monkeypatch.setattr(CostModel, "pays", lambda *arguments, **options: True)

    def start_with_memory(folder: str = "kv", **settings: Any) -> Engine:
        options = {"kv_shared_layers": SHARED, "prefill_chunk": PREFILL, "kv": SETTINGS} | settings
        engine = start_engine(kv_folder=tmp_path / folder, **options)
        for name in ("first", "second", "deep"):
            engine.load_adapter(name, getattr(adapters, name))
        return engine

    return start_with_memory


def ask(engine: Engine, model: str, token_ids: tuple[int, ...] = LONG, **options: Any) -> Completion:
    completion = engine.generate([Request(model, token_ids, GREEDY, kv=KVOptions(**options))])[0]
    assert engine.memory is not None
    assert engine.memory.flush(20)
    return completion


def stored(engine: Engine, model: str, tokens: int) -> list[np.ndarray[Any, Any]]:
    """All bands of the first `tokens` tokens of LONG as they are stored."""
    assert engine.memory is not None
    store = engine.memory.store
    version = engine.versions.find(model)
    assert version is not None
    states = entering_band(version, "")
    arrays = []
    for band in (*kv_bands(version, ""), *([states] if states is not None else [])):
        match = store.match(band.identity, LONG[:tokens])
        assert match.tokens == tokens
        out = np.empty(band.identity.shape(tokens), band.identity.dtype)
        assert store.load(band.identity, match, out) == tokens
        arrays.append(out)
    return arrays


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_lifted_is_bit_for_bit_what_a_whole_computation_gives(start: StartEngine, dtype: str) -> None:
    promoted, fresh = start(dtype=dtype), start("other", dtype=dtype)
    ask(promoted, "base")
    lifted, computed = ask(promoted, "first"), ask(fresh, "first")
    assert lifted.choices == computed.choices, "tokens and log-probs to the last bit"
    assert computed.usage.lifted_tokens == 0
    whole = len(LONG) // CHUNK * CHUNK
    assert lifted.usage.lifted_tokens >= whole
    for ours, theirs in zip(stored(promoted, "first", whole), stored(fresh, "first", whole), strict=True):
        assert np.array_equal(ours, theirs)


def test_a_forward_from_the_shared_layer_continues_the_one_below(start: StartEngine) -> None:
    engine = start()
    first = engine.versions.find("first")
    assert first is not None
    base, adapter = engine.versions.base.decoder, first.decoder
    ids = LONG[:100]
    control, control_states = adapter.new_kv(100), adapter.new_entering(100)
    kv, states = base.new_kv(100), base.new_entering(100)
    with torch.inference_mode():
        expected = adapter.forward([Run(ids, 0, control, control_states)])
        base.forward([Run(ids, 0, kv, states)])
        assert not torch.equal(kv, control)
        found = adapter.forward([Run(ids, 0, kv, states)], SHARED)
    assert torch.equal(found, expected)
    assert torch.equal(kv, control)
    assert states is not None
    assert control_states is not None
    assert torch.equal(states, control_states)
    with pytest.raises(ValueError, match="begins at layer"):
        adapter.forward([Run(ids, 0, kv, states)], 2)
    with pytest.raises(ValueError, match="buffer"):
        adapter.forward([Run(ids, 0, kv)], SHARED)


def test_the_account_tells_what_was_lifted(start: StartEngine) -> None:
    engine = start()
    ask(engine, "base")
    computed_before = engine.load_now.computed_tokens
    usage = ask(engine, "first").usage
    lifted = (len(LONG) - 1) // 16 * 16
    assert (usage.lifted_tokens, usage.cached_tokens, usage.computed_tokens) == (lifted, 0, len(LONG) - lifted)
    spans = [(span.start, span.end, span.source) for span in usage.spans]
    assert spans == [(0, lifted, "lifted"), (lifted, len(LONG), "computed"), (len(LONG), len(LONG) + 6, "generated")]
    version = engine.versions.find("first")
    assert version is not None
    assert {span.weights_id for span in usage.spans} == {version.weights_id}
    assert engine.load_now.lifted_tokens == lifted
    assert engine.load_now.computed_tokens - computed_before == len(LONG) - lifted


def test_afterwards_everything_is_restored_and_nothing_lifted(start: StartEngine) -> None:
    engine = start()
    ask(engine, "base")
    first = ask(engine, "first")
    turn = LONG + first.choices[0].token_ids
    usage = ask(engine, "first", turn + prompt(9, 5)).usage
    assert (usage.lifted_tokens, usage.cached_tokens) == (0, len(turn) - 1)


def test_what_enters_the_layer_is_not_read_by_an_ordinary_restore(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    ask(engine, "base")
    assert engine.memory is not None
    store = engine.memory.store
    bands: list[str] = []
    load_from = store.load_from

    def noting(identity: Any, *arguments: Any) -> Any:
        bands.append(identity.band)
        return load_from(identity, *arguments)

    monkeypatch.setattr(store, "load_from", noting)
    engine.generate([Request("base", LONG, GREEDY, kv=KVOptions(save=False))])
    assert bands == ["0-1", "1-3"]


def test_session_after_session_nothing_is_missing(start: StartEngine) -> None:
    """Each turn is restored without the states that enter the layer; still, what is stored of them has no holes."""
    engine = start()
    history = LONG[:70]
    for turn in range(5):
        history += ask(engine, "base", history).choices[0].token_ids
        history += prompt(23, turn)
    known = len(history) - 23 - 1
    usage = ask(engine, "first", history).usage
    assert usage.lifted_tokens == known
    assert usage.computed_tokens == len(history) - known


def test_a_second_promotion_lifts_what_the_first_lifted_and_computed(start: StartEngine) -> None:
    engine, fresh = start(), start("other")
    ask(engine, "base", LONG[:200])
    ask(engine, "first", LONG[:250])
    second = ask(engine, "second", LONG)
    assert second.usage.lifted_tokens == 240, "what the first version computed itself is found as well"
    assert second.choices[0].token_ids == ask(fresh, "second", LONG).choices[0].token_ids


def test_keys_below_are_those_of_every_version_that_leaves_the_layers_alone(start: StartEngine) -> None:
    engine = start()

    def keys(model: str) -> list[list[bytes]]:
        version = engine.versions.find(model)
        assert version is not None
        states = entering_band(version, "")
        assert states is not None
        below, above = kv_bands(version, "")
        return [Chain(band.identity, LONG, CHUNK).keys for band in (below, states, above)]

    base, first, second, deep = (keys(model) for model in ("base", "first", "second", "deep"))
    assert base[:2] == first[:2] == second[:2]
    assert not {key for band in deep for key in band} & {
        key for each in (base, first, second) for b in each for key in b
    }
    assert len({tuple(each[2]) for each in (base, first, second, deep)}) == 4


def test_an_adapter_below_the_shared_layers_computes_everything(start: StartEngine) -> None:
    engine, fresh = start(), start("other")
    ask(engine, "base")
    deep = ask(engine, "deep")
    assert (deep.usage.lifted_tokens, deep.usage.cached_tokens) == (0, 0)
    assert deep.choices == ask(fresh, "deep").choices
    assert ask(engine, "deep").usage.cached_tokens > 200, "and finds its own"
    assert ask(engine, "base").usage.lifted_tokens == 0


def test_lossy_states_are_never_lifted_from(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    assert engine.memory is not None
    store = engine.memory.store
    save = store.save

    def lossy(*arguments: Any, **options: Any) -> None:
        if arguments[0].band.startswith("hidden"):
            options["fidelity"] = "int8"
        save(*arguments, **options)

    monkeypatch.setattr(store, "save", lossy)
    ask(engine, "base")
    assert ask(engine, "first").usage.lifted_tokens == 0


def test_a_hole_in_the_states_ends_what_is_lifted(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    assert engine.memory is not None
    store = engine.memory.store
    match = store.match

    def holed(identity: Any, *arguments: Any, **options: Any) -> Match:
        found = match(identity, *arguments, **options)
        return found.limited(96) if identity.band.startswith("hidden") else found

    ask(engine, "base")
    monkeypatch.setattr(store, "match", holed)
    usage = ask(engine, "first").usage
    assert (usage.lifted_tokens, usage.computed_tokens) == (96, len(LONG) - 96)
    monkeypatch.undo()


def test_many_requests_of_many_versions_at_once(start: StartEngine) -> None:
    engine, fresh = start(), start("other", kv_shared_layers=0)
    ask(engine, "base")
    requests = [
        Request(model, LONG[: 290 + at], GREEDY)
        for at, model in enumerate(("first", "second", "base", "deep", "first"))
    ]
    found = engine.generate(requests)
    expected = [fresh.generate([request])[0] for request in requests]
    assert [each.choices[0].token_ids for each in found] == [each.choices[0].token_ids for each in expected]


def test_shared_layers_must_fit_the_model(start_engine: StartEngine) -> None:
    with pytest.raises(Exception, match="kv_shared_layers=3 does not fit 3 layers"):
        start_engine(kv_shared_layers=3)


def test_decoders_without_shared_layers_keep_no_states(start_engine: StartEngine) -> None:
    decoder: Decoder = start_engine().versions.base.decoder
    assert decoder.new_entering(10) is None
    assert decoder.buffer_bytes_per_token == decoder.kv_bytes_per_token
