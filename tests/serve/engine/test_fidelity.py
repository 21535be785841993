"""How exact restored KV is, and whose: asked for, told, and passed on to what is computed over it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memory.kv.cost import CostModel
from memory.kv.fidelity import Fidelity
from memory.kv.match import Match
from memory.kv.settings import KVSettings
from serve.engine.bands import as_array, identity_of, kv_bands
from serve.engine.engine import Engine
from serve.engine.errors import InvalidRequest
from serve.engine.model import Run
from serve.engine.request import Completion, KVOptions, Request, Sampling
from tests.serve.tiny import build_adapter, prompt

StartEngine = Callable[..., Engine]
SETTINGS = KVSettings(chunk_tokens=32, min_tokens=4, disk_reserve_bytes=0, upkeep_seconds=0)
GREEDY = Sampling(max_tokens=6, temperature=0, ignore_eos=True)
LONG = prompt(200)


def everything(self: CostModel, match: Match, total: int, beside: Match | None = None) -> int:
    return match.tokens


@pytest.fixture
def start(start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartEngine:
    monkeypatch.setattr(CostModel, "tokens_to_load", everything)
    monkeypatch.setattr(CostModel, "pays", lambda *arguments, **options: True)

    def start_with_memory(**settings: Any) -> Engine:
        return start_engine(kv_folder=tmp_path / "kv", **({"kv": SETTINGS} | settings))

    return start_with_memory


def ask(engine: Engine, token_ids: tuple[int, ...] = LONG, model: str = "base", **options: Any) -> Completion:
    completion = engine.generate([Request(model, token_ids, GREEDY, kv=KVOptions(**options))])[0]
    assert engine.memory is not None
    assert engine.memory.flush(20)
    return completion


def put(engine: Engine, tokens: int, fidelity: Fidelity) -> None:
    """Stores the KV of LONG's first tokens as being of that fidelity."""
    version = engine.versions.base
    kv = version.decoder.new_kv(tokens)
    with torch.inference_mode():
        version.decoder.forward([Run(LONG[:tokens], 0, kv)])
    assert engine.memory is not None
    engine.memory.store.save(identity_of(version, ""), LONG[:tokens], as_array(kv), fidelity=fidelity)
    assert engine.memory.flush(20)


def told(completion: Completion) -> list[tuple[int, int, str, str]]:
    return [(span.start, span.end, span.source, span.fidelity) for span in completion.usage.spans]


def test_what_is_computed_over_less_exact_kv_is_no_more_exact(start: StartEngine) -> None:
    engine = start()
    put(engine, 64, "exact")
    put(engine, 128, "int4")
    first = ask(engine)
    assert first.usage.fidelity == "int4"
    assert told(first) == [
        (0, 64, "ram", "exact"),
        (64, 128, "ram", "int4"),
        (128, 200, "computed", "int4"),
        (200, 206, "generated", "int4"),
    ]
    turn = LONG + first.choices[0].token_ids + prompt(8, 4)
    assert told(ask(engine, turn))[:3] == [
        (0, 64, "ram", "exact"),
        (64, 205, "ram", "int4"),
        (205, 214, "computed", "int4"),
    ]


def test_what_is_not_exact_enough_is_computed_and_replaced(start: StartEngine) -> None:
    engine = start()
    put(engine, 64, "exact")
    put(engine, 128, "int4")
    ask(engine)
    better = ask(engine, least_fidelity="int8")
    assert (better.usage.cached_tokens, better.usage.fidelity) == (64, "exact")
    again = ask(engine, least_fidelity="exact")
    assert (again.usage.cached_tokens, again.usage.fidelity) == (192, "exact"), "it climbed back"
    assert ask(engine).usage.fidelity == "exact"


def test_a_fidelity_that_does_not_exist_is_refused(start: StartEngine) -> None:
    with pytest.raises(InvalidRequest, match="kv_least_fidelity must be one of exact, int8, int4, compact"):
        ask(start(), least_fidelity="perfect")


def test_what_has_expired_is_computed(start: StartEngine) -> None:
    engine = start()
    ask(engine, expires_at=time.time() - 1)
    assert ask(engine, expires_at=time.time() + 3600).usage.cached_tokens == 0
    assert ask(engine).usage.cached_tokens == 192
    with pytest.raises(InvalidRequest, match="kv_expires_at"):
        ask(engine, expires_at=-1.0)


def test_kv_of_another_version_stands_in_where_that_is_allowed(start: StartEngine, tiny_adapter: Path) -> None:
    engine = start()
    adapter = engine.load_adapter("new", tiny_adapter)
    base = engine.versions.base
    ask(engine, LONG[:150])
    assert ask(engine, LONG[:150], "new").usage.cached_tokens == 0
    stale = ask(engine, LONG, "new", reuse_model="base", save=False)
    assert stale.usage.cached_tokens == 144
    assert stale.usage.fidelity == "exact", "its own goes first, as far as it goes"
    ask(engine, LONG)
    stale = ask(engine, LONG, "new", reuse_model="base")
    assert [(span.end, span.source, span.fidelity, span.weights_id) for span in stale.usage.spans] == [
        (144, "ram", "exact", adapter.weights_id),
        (192, "ram", "stale", base.weights_id),
        (200, "computed", "stale", adapter.weights_id),
        (206, "generated", "stale", adapter.weights_id),
    ]
    assert (stale.usage.cached_tokens, stale.usage.fidelity) == (192, "stale")
    fresh = ask(engine, LONG, "new")
    assert (fresh.usage.cached_tokens, fresh.usage.fidelity) == (144, "exact"), "nothing of it was remembered"


def test_stale_kv_is_the_other_versions_and_own_kv_is_not_overwritten(start: StartEngine, tiny_adapter: Path) -> None:
    engine = start()
    version = engine.load_adapter("new", tiny_adapter)
    ask(engine, LONG)
    ask(engine, LONG[:150], "new")
    found = ask(engine, LONG, "new", reuse_model="base", save=False).choices[0].token_ids
    old, own = engine.versions.base.decoder, version.decoder
    kv, other = own.new_kv(206), old.new_kv(206)
    with torch.inference_mode():
        own.forward([Run(LONG[:150], 0, kv)])
        old.forward([Run(LONG, 0, other)])
        kv[:, :, :, 144:192] = other[:, :, :, 144:192]
        hidden = own.forward([Run(LONG[192:], 192, kv)])
        tokens = [int(own.logits(hidden[-1:]).argmax())]
        for position in range(200, 205):
            hidden = own.forward([Run(tokens[-1:], position, kv)])
            tokens.append(int(own.logits(hidden).argmax()))
    assert found == tuple(tokens)


def test_a_version_that_is_gone_is_not_reused_and_no_error(start: StartEngine, tiny_adapter: Path) -> None:
    engine = start()
    engine.load_adapter("old", tiny_adapter)
    ask(engine, model="old")
    assert ask(engine, reuse_model="old").usage.cached_tokens == 192
    engine.unload_adapter("old")
    assert ask(engine, prompt(200, 5), reuse_model="old").usage.cached_tokens == 0
    assert ask(engine, LONG, reuse_model="unheard of").usage.fidelity == "exact"


def test_reuse_goes_before_lifting(start: StartEngine, tmp_path: Path, tiny_model: Path) -> None:
    engine = start(kv_shared_layers=1)
    engine.load_adapter("new", build_adapter(tmp_path / "new", tiny_model, layers_to_transform=[1, 2]))
    ask(engine)
    stale = ask(engine, model="new", reuse_model="base").usage
    assert (stale.lifted_tokens, stale.cached_tokens, stale.fidelity) == (0, 192, "stale")
    lifted = ask(engine, model="new").usage
    assert (lifted.lifted_tokens, lifted.fidelity) == (192, "exact")


def test_lifting_over_less_exact_kv_is_no_more_exact(start: StartEngine, tmp_path: Path, tiny_model: Path) -> None:
    engine = start(kv_shared_layers=1)
    engine.load_adapter("new", build_adapter(tmp_path / "new", tiny_model, layers_to_transform=[1, 2]))
    assert engine.memory is not None
    store = engine.memory.store
    below = kv_bands(engine.versions.base, "")[0]
    ask(engine)
    store.clear()
    save = store.save

    def lossy_below(*arguments: Any, **options: Any) -> None:
        if arguments[0].band == below.identity.band:
            options["fidelity"] = "int8"
        save(*arguments, **options)

    store.save = lossy_below  # type: ignore[method-assign]
    ask(engine)
    usage = ask(engine, model="new", save=False).usage
    assert (usage.lifted_tokens, usage.fidelity) == (192, "int8")
    assert ask(engine, model="new", least_fidelity="exact").usage.lifted_tokens == 0
