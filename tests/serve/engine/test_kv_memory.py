"""KV memory under the engine: what is restored is what was computed, and never serves other weights or tenants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memory.kv.cost import CostModel
from memory.kv.match import Match
from memory.kv.settings import KVSettings
from memory.kv.store import KVStore
from serve.engine.engine import Engine
from serve.engine.errors import InvalidRequest
from serve.engine.kv_memory import as_array, identity_of
from serve.engine.model import Decoder, Run
from serve.engine.request import Completion, DoneEvent, Event, FailedEvent, KVOptions, Request, Sampling
from tests.serve.tiny import prompt

StartEngine = Callable[..., Engine]
GREEDY = Sampling(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0)
SETTINGS = KVSettings(chunk_tokens=32, min_tokens=4, disk_reserve_bytes=0)
LONG, OTHER = prompt(200), prompt(100, 3)
AGAIN = 192
"""Tokens of LONG found when it is asked again: the last is always computed, and of a chunk that goes on differently
multiples of `PREFIX_TOKENS` serve."""


def all_of_it(self: CostModel, match: Match, total: int) -> int:
    return match.tokens


def none_of_it(self: CostModel, match: Match, total: int) -> int:
    return 0


@pytest.fixture
def start(start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartEngine:
    """Starts engines on one memory folder that load all they find: a tiny model computes faster than it loads."""
    monkeypatch.setattr(CostModel, "tokens_to_load", all_of_it)

    def start_with_memory(**settings: object) -> Engine:
        return start_engine(kv_folder=tmp_path / "kv", kv=SETTINGS, **settings)

    return start_with_memory


def ask(
    engine: Engine, token_ids: tuple[int, ...] = LONG, model: str = "base", salt: str = "", **options: Any
) -> Completion:
    completion = engine.generate([Request(model, token_ids, GREEDY, cache_salt=salt, kv=KVOptions(**options))])[0]
    assert engine.memory is not None
    assert engine.memory.flush(20)
    return completion


def sources(completion: Completion) -> list[tuple[int, int, str]]:
    return [(span.start, span.end, span.source) for span in completion.usage.spans]


def computed_kv(decoder: Decoder, token_ids: tuple[int, ...], prefill: int) -> torch.Tensor:
    """The KV of `token_ids` computed as the engine does it: a prompt of `prefill` tokens, then one by one."""
    kv = decoder.new_kv(len(token_ids))
    with torch.inference_mode():
        decoder.forward([Run(token_ids[:prefill], 0, kv)])
        for position in range(prefill, len(token_ids)):
            decoder.forward([Run(token_ids[position : position + 1], position, kv)])
    return kv


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_restored_is_bit_for_bit_what_was_computed(start: StartEngine, tmp_path: Path, dtype: str) -> None:
    engine = start(dtype=dtype)
    reply = ask(engine).choices[0].token_ids
    history = (LONG + reply)[:-1]
    expected = as_array(computed_kv(engine.versions.base.decoder, history, len(LONG)))
    identity = identity_of(engine.versions.base, "")
    engine.close()
    with KVStore(SETTINGS, tmp_path / "kv") as store:
        match = store.match(identity, history)
        assert match.tokens == len(history)
        restored = np.empty(identity.shape(len(history)), identity.dtype)
        assert store.load(identity, match, restored) == len(history)
    assert np.array_equal(restored, expected)


def test_the_next_turn_goes_on_from_the_reply(start: StartEngine) -> None:
    engine = start()
    first = ask(engine)
    assert first.usage.cached_tokens == 0
    history = LONG + first.choices[0].token_ids
    turn = history + prompt(15, 9)
    warm = ask(engine, turn)
    known = len(history) - 1
    assert sources(warm) == [
        (0, known, "ram"),
        (known, len(turn), "computed"),
        (len(turn), len(turn) + 10, "generated"),
    ]
    assert warm.usage.computed_tokens == len(turn) - known
    assert warm.usage.cached_tokens == warm.usage.ram_tokens == known

    control = as_array(computed_kv(engine.versions.base.decoder, history[:-1], len(LONG)))
    kv = torch.zeros((*control.shape[:3], len(turn), control.shape[4]))
    kv[:, :, :, :known] = torch.from_numpy(control)
    decoder = engine.versions.base.decoder
    with torch.inference_mode():
        logits = decoder.logits(decoder.forward([Run(turn[known:], known, kv)])[-1:])
    token = warm.choices[0].token_ids[0]
    assert token == int(logits.argmax())
    assert warm.choices[0].logprobs[0].logprob == float(logits.log_softmax(-1)[0, token])


def test_a_fresh_process_restores_from_disk(start: StartEngine) -> None:
    first = start()
    cold = ask(first)
    first.close()
    warm = ask(start())
    assert warm.usage.disk_tokens == AGAIN
    assert (warm.usage.ram_tokens, warm.usage.computed_tokens) == (0, len(LONG) - AGAIN)
    assert warm.choices[0].token_ids == cold.choices[0].token_ids


def test_other_weights_never_see_it(start: StartEngine, tiny_adapter: Path) -> None:
    engine = start()
    engine.load_adapter("a", tiny_adapter)
    cold_base, cold_adapter = ask(engine), ask(engine, model="a")
    assert cold_base.usage.cached_tokens == cold_adapter.usage.cached_tokens == 0
    assert cold_base.choices[0].token_ids != cold_adapter.choices[0].token_ids
    for _ in range(2):
        warm_base, warm_adapter = ask(engine), ask(engine, model="a")
        assert warm_base.usage.cached_tokens == warm_adapter.usage.cached_tokens == AGAIN
        assert warm_base.choices[0].token_ids == cold_base.choices[0].token_ids
        assert warm_adapter.choices[0].token_ids == cold_adapter.choices[0].token_ids
    assert {span.weights_id for span in warm_adapter.usage.spans} == {engine.versions.list()[1].weights_id}


def test_the_tier_told_is_the_one_a_chunk_came_from(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    ask(engine)
    assert engine.memory is not None
    store = engine.memory.store
    match_first = store.match

    def match_then_evict(*arguments: Any, **options: Any) -> Match:
        match = match_first(*arguments, **options)
        store._ram.clear()  # as other sequences may do between look-up and load
        return match

    monkeypatch.setattr(store, "match", match_then_evict)
    usage = ask(engine).usage
    assert (usage.ram_tokens, usage.disk_tokens) == (0, AGAIN)
    assert [span.source for span in usage.spans] == ["disk", "computed", "generated"]


def test_forgetting_reaches_every_version_and_what_still_runs(start: StartEngine, tiny_adapter: Path) -> None:
    engine = start()
    engine.load_adapter("v1", tiny_adapter)
    ask(engine, owner="session")
    ask(engine, model="v1", owner="session")
    ask(engine, OTHER, owner="another")
    engine.unload_adapter("v1")
    assert engine.memory is not None
    ended = threading.Event()
    begun = threading.Event()

    def listen(event: Event) -> None:
        begun.set()
        if isinstance(event, DoneEvent | FailedEvent):
            ended.set()

    slow = replace(GREEDY, max_tokens=300)
    engine.submit([Request("base", LONG, slow, kv=KVOptions(owner="session"))], listen)
    assert begun.wait(20)
    assert not ended.is_set()
    gone = engine.forget(["session"], "")
    assert gone.disk >= 2 * len(LONG) // 32
    assert ended.wait(60)
    assert ask(engine).usage.cached_tokens == 0, "a request that ran meanwhile does not bring it back"
    assert ask(engine).usage.cached_tokens == AGAIN, "what others say afterwards is remembered"
    assert ask(engine, OTHER).usage.cached_tokens == 96, "others' stays"
    with pytest.raises(InvalidRequest, match="owners"):
        engine.forget([""], "")


def test_an_adapter_loaded_again_under_another_name_finds_its_own(start: StartEngine, tiny_adapter: Path) -> None:
    engine = start()
    engine.load_adapter("a", tiny_adapter)
    ask(engine, model="a")
    engine.unload_adapter("a")
    engine.load_adapter("b", tiny_adapter)
    assert ask(engine, model="b").usage.cached_tokens == AGAIN


def test_tenants_do_not_share(start: StartEngine) -> None:
    engine = start()
    ask(engine, salt="one")
    assert ask(engine, salt="two").usage.cached_tokens == 0
    assert ask(engine, salt="").usage.cached_tokens == 0
    assert ask(engine, salt="one").usage.cached_tokens == AGAIN


def test_dtypes_do_not_share(start: StartEngine) -> None:
    ask(start())
    assert ask(start(dtype="bfloat16")).usage.cached_tokens == 0


def test_what_is_not_to_be_saved_is_not(start: StartEngine) -> None:
    engine = start()
    engine.generate([Request("base", LONG, GREEDY, kv=KVOptions(save=False))])
    scored = engine.generate([Request("base", LONG, replace(GREEDY, prompt_logprobs=0))])[0]
    assert scored.usage.cached_tokens == 0
    assert ask(engine).usage.cached_tokens == 0
    scored = engine.generate([Request("base", LONG, replace(GREEDY, prompt_logprobs=0))])[0]
    assert scored.usage.computed_tokens == len(LONG), "scoring computes everything, also when it is known"


def test_every_choice_is_remembered(start: StartEngine) -> None:
    engine = start()
    sampling = Sampling(max_tokens=20, temperature=1.5, seed=1, n=2, ignore_eos=True)
    reply = engine.generate([Request("base", LONG, sampling)])[0]
    for choice in reply.choices:
        assert ask(engine, LONG + choice.token_ids).usage.cached_tokens == len(LONG) + 19


def test_a_damaged_memory_costs_time_only(start: StartEngine, tmp_path: Path) -> None:
    first = start()
    cold = ask(first)
    first.close()
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.stat().st_size > 2000]
    for path in files:
        if "index" not in path.name:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0xFF
            path.write_bytes(data)
    engine = start()
    again = ask(engine)
    assert again.choices[0].token_ids == cold.choices[0].token_ids
    assert again.usage.cached_tokens < AGAIN
    assert engine.memory is not None
    assert engine.memory.stats().store.quarantined > 0


def test_a_memory_that_fails_costs_time_only(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    cold = ask(engine)

    def broken(self: KVStore, *arguments: object) -> int:
        raise RuntimeError("no luck")

    monkeypatch.setattr(KVStore, "load_from", broken)
    again = ask(engine)
    assert again.usage.cached_tokens == 0
    assert again.choices[0].token_ids == cold.choices[0].token_ids


def test_what_is_cheaper_to_compute_is_computed(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    ask(engine)
    monkeypatch.setattr(CostModel, "tokens_to_load", none_of_it)
    assert ask(engine).usage.cached_tokens == 0
    assert engine.memory is not None
    assert engine.memory.stats().rates["prefill"] is not None, "prefill speed is measured"


def test_an_aborted_prompt_is_remembered_as_far_as_it_got(start: StartEngine) -> None:
    engine = start(prefill_chunk=16)
    long = prompt(480, 5)
    ticket = engine.submit([Request("base", long, Sampling(max_tokens=1))], lambda event: None)
    while engine.load_now.computed_tokens < 64:
        pass
    engine.abort(ticket)
    while engine.load_now.running:
        pass
    assert engine.memory is not None
    assert engine.memory.flush(20)
    assert ask(engine, long).usage.cached_tokens >= 32


def test_a_fresh_engine_knows_how_fast_it_computes(start: StartEngine) -> None:
    engine = start()
    assert engine.memory is not None
    assert engine.memory.stats().rates["prefill"] is not None
    assert engine.load_now.computed_tokens == 0, "what warms it up is no request's work"


def test_a_turn_that_follows_at_once_finds_what_is_still_being_saved(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    assert engine.memory is not None
    store = engine.memory.store
    save = store.save

    def slow(*arguments: Any, **options: Any) -> None:
        time.sleep(0.3)
        save(*arguments, **options)

    monkeypatch.setattr(store, "save", slow)
    first = engine.generate([Request("base", LONG, GREEDY)])[0]
    turn = LONG + first.choices[0].token_ids + prompt(5, 8)
    usage = engine.generate([Request("base", turn, GREEDY)])[0].usage
    assert usage.cached_tokens == len(LONG) + 9
