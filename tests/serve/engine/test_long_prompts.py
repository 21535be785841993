"""Long prompts: computed in pieces, stored while that lasts, found again as far as they are unchanged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memory.kv.cost import CostModel
from memory.kv.match import Match
from memory.kv.settings import KVSettings
from memory.kv.store import KVStore
from serve.engine.bands import identity_of
from serve.engine.engine import Engine
from serve.engine.request import Event, KVOptions, Request, Sampling
from serve.engine.stepper import Stepper
from tests.serve.tiny import VOCABULARY, build_thin_model

StartEngine = Callable[..., Engine]
TOKENS = 20_480
STORE_ONLY = Sampling(max_tokens=0)
CHUNK = 256
SETTINGS = KVSettings(chunk_tokens=CHUNK, disk_reserve_bytes=0, upkeep_seconds=0)


def text(tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Ids that repeat nothing for long."""
    state = seed * 7919 + 1
    ids = []
    for _ in range(tokens):
        state = (state * 1103515245 + 12345) % 2**31
        ids.append(3 + state // 65536 % (VOCABULARY - 3))
    return tuple(ids)


LONG = text(TOKENS)


def everything(self: CostModel, match: Match, total: int, beside: Match | None = None) -> int:
    return match.tokens


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_thin_model(tmp_path_factory.mktemp("long") / "model", context=32_768)


@pytest.fixture
def start(start_engine: StartEngine, long_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartEngine:
    monkeypatch.setattr(CostModel, "tokens_to_load", everything)

    def start_with_memory(**settings: Any) -> Engine:
        options = {"kv": SETTINGS, "model": long_model} | settings
        return start_engine(kv_folder=tmp_path / "kv", **options)

    return start_with_memory


def ask(engine: Engine, token_ids: tuple[int, ...]) -> tuple[int, int]:
    """Restored and computed tokens."""
    usage = engine.generate([Request("base", token_ids, STORE_ONLY)])[0].usage
    assert engine.memory is not None
    assert engine.memory.flush(60)
    return usage.cached_tokens, usage.computed_tokens


def test_what_is_unchanged_in_front_is_reused(start: StartEngine) -> None:
    engine = start()
    assert ask(engine, LONG) == (0, TOKENS)
    last = (*LONG[:-1], LONG[-1] % 90 + 4)
    assert ask(engine, last) == (TOKENS - CHUNK + 240, 16), "the end changed"
    at = 5_000
    edited = LONG[:at] + text(7, 9) + LONG[at + 7 :]
    assert ask(engine, edited) == (at // 16 * 16, TOKENS - at // 16 * 16), "everything before the edit"
    inserted = LONG[:at] + text(7, 9) + LONG[at:]
    found, computed = ask(engine, inserted)
    assert found >= at // CHUNK * CHUNK
    assert found + computed == len(inserted)
    assert ask(engine, LONG + text(50, 3)) == (TOKENS, 50), "and what follows it"


def test_it_is_stored_while_it_is_computed(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is killed half way has its first half stored."""
    engine = start()
    half = threading.Event()
    go_on = threading.Event()
    execute = Stepper.execute

    def held(self: Stepper, step: Any) -> None:
        if step.works[0].sequence.computed >= TOKENS // 2:
            half.set()
            assert go_on.wait(60)
        execute(self, step)

    monkeypatch.setattr(Stepper, "execute", held)
    ticket = engine.submit([Request("base", LONG, STORE_ONLY)], lambda event: None)
    assert half.wait(120)
    assert engine.memory is not None
    assert engine.memory.flush(60)
    assert engine.settings.kv_folder is not None
    with KVStore(SETTINGS, engine.settings.kv_folder) as other:
        stored = other.match(identity_of(engine.versions.base, ""), LONG).tokens
    assert TOKENS // 2 - max(1024, TOKENS // 16) - 512 <= stored <= TOKENS // 2
    engine.abort(ticket)
    go_on.set()
    monkeypatch.undo()
    monkeypatch.setattr(CostModel, "tokens_to_load", everything)
    found, computed = ask(engine, LONG)
    assert found >= TOKENS // 2, "what an aborted request computed is kept"
    assert found + computed == TOKENS


def test_nothing_of_a_prompt_is_stored_for_an_owner_who_was_deleted_meanwhile(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    begun, go_on = threading.Event(), threading.Event()
    execute = Stepper.execute

    def held(self: Stepper, step: Any) -> None:
        if step.works[0].sequence.computed >= 4096:
            begun.set()
            assert go_on.wait(60)
        execute(self, step)

    monkeypatch.setattr(Stepper, "execute", held)
    engine.submit([Request("base", LONG, STORE_ONLY, kv=KVOptions(owner="session"))], lambda event: None)
    assert begun.wait(120)
    assert engine.memory is not None
    assert engine.memory.flush(60)
    gone = engine.forget(["session"], "")
    assert gone.disk >= 8
    go_on.set()
    while engine.load_now.running:
        time.sleep(0.01)
    assert engine.memory.flush(60)
    stats = engine.memory.stats().store
    assert (stats.disk.chunks, stats.ram.chunks) == (0, 0)


def test_a_queue_that_is_too_small_holds_nothing_up_and_loses_nothing(start: StartEngine) -> None:
    """A long prompt waits for the writer bit by bit; what waits stays within the budget."""
    small = SETTINGS.model_copy(update={"queue_bytes": 1 << 20, "ram_bytes": 0})
    engine = start(kv=small)
    assert engine.memory is not None
    store = engine.memory.store
    most = 0
    done = threading.Event()

    def listen(event: Event) -> None:
        done.set()

    engine.submit([Request("base", LONG, STORE_ONLY)], listen)
    while not done.wait(0.005):
        most = max(most, store.stats().waiting_bytes)
    assert engine.memory.flush(60)
    assert 0 < most <= small.queue_bytes
    assert store.stats().dropped == 0
    assert store.match(identity_of(engine.versions.base, ""), LONG).tokens == TOKENS


def test_the_work_of_a_step_does_not_grow_with_what_was_before(start: StartEngine) -> None:
    """Host-side work: as many tokens, blocks and masks at the end of a long prompt as at its beginning."""
    from serve.engine.attention import LONG_KEYS, QUERY_BLOCK, plan_blocks

    dtype = start().versions.base.decoder.dtype
    sizes = {}
    for position in (0, 8_192, 190_000):
        blocks = plan_blocks(position, 512, None, dtype)
        assert sum(block.last - block.first for block in blocks) == 512
        assert max((block.last - block.first) * block.key_last for block in blocks) <= 2 * QUERY_BLOCK * LONG_KEYS
        sizes[position] = sum(block.mask.numel() for block in blocks if block.mask is not None)
    assert sizes[190_000] <= sizes[8_192] == sizes[0]
