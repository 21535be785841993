"""What users report of stores of KV caches, each as a test: named after the symptom, through the public face."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memory import files as files_module
from memory.kv.cost import CostModel
from memory.kv.match import ChunkRef, Match
from memory.kv.settings import KVSettings
from memory.kv.store import KVStore
from serve.engine import load_engine
from serve.engine.engine import Engine
from serve.engine.kv_memory import as_array, identity_of
from serve.engine.model import Run
from serve.engine.request import Completion, KVOptions, Request, Sampling
from serve.engine.settings import EngineSettings
from serve.gateway.text import TextCodec
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt, restore
from tests.serve import tiny
from tests.serve.gateway.conftest import RunningGateway, gateway_settings
from tests.serve.gateway.fake_worker import END, FakeWorker

IDS = prompt(3 * CHUNK)
QUESTION = tiny.prompt(200)
GREEDY = Sampling(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
SETTINGS = KVSettings(chunk_tokens=32, min_tokens=4, disk_reserve_bytes=0, upkeep_seconds=0.0)
REUSED = 192
"""Tokens of QUESTION that are found when it is asked again: the last is always computed, the rest in sixteens."""
PATIENCE = 60
"""Seconds after which something counts as hanging for ever."""


def chunk_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("chunks/*/*/*"))


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in chunk_files(folder))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, base: Path) -> tuple[Path, Path]:
    """What was trained yesterday and what was trained today."""
    folder = tmp_path_factory.mktemp("adapters")
    old, new = (tiny.build_adapter(folder / name, base, seed=seed) for seed, name in enumerate(("old", "new"), 1))
    return old, new


@pytest.fixture
def start(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Starts engines on one memory that load what they find: a tiny model computes faster than any disk reads."""
    monkeypatch.setattr(CostModel, "tokens_to_load", lambda self, match, *_, **__: match.tokens)
    engines: list[Engine] = []

    def start_engine(memory: str = "kv") -> Engine:
        settings = EngineSettings(model=base, dtype="float32", kv_folder=tmp_path / memory, kv=SETTINGS)
        engines.append(load_engine(settings))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.close()


def ask(engine: Engine, model: str = "base", salt: str = "", owner: str = "") -> Completion:
    request = Request(model, QUESTION, GREEDY, cache_salt=salt, kv=KVOptions(owner=owner))
    completion = engine.generate([request])[0]
    assert engine.memory is not None
    assert engine.memory.flush(PATIENCE)
    return completion


def test_kv_of_old_weights_is_loaded_after_an_update(
    start: Callable[..., Engine], adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    """Weights rewritten in place, under the same path and the same name, with and without a restart between."""
    place = shutil.copytree(adapters[0], tmp_path / "adapter")
    engine = start()
    engine.load_adapter("latest", place)
    old = ask(engine, "latest")
    engine.unload_adapter("latest")
    shutil.copytree(adapters[1], place, dirs_exist_ok=True)
    engine.load_adapter("latest", place)
    updated = ask(engine, "latest")
    engine.close()

    untouched = start("other memory")
    untouched.load_adapter("latest", adapters[1])
    truth = ask(untouched, "latest")
    assert old.choices[0].token_ids != truth.choices[0].token_ids, "the update matters"
    assert updated.choices == truth.choices
    assert updated.usage.cached_tokens == 0

    restarted = start()
    shutil.copytree(adapters[0], place, dirs_exist_ok=True)
    restarted.load_adapter("latest", place)
    assert ask(restarted, "latest").choices[0].token_ids == old.choices[0].token_ids


def test_a_stale_hit_is_still_counted_as_cached(start: Callable[..., Engine], adapters: tuple[Path, Path]) -> None:
    """Cold and warm, old and new weights: what is told as cached was computed by the weights that use it."""
    engine = start()
    for name, folder in zip(("old", "new"), adapters, strict=True):
        engine.load_adapter(name, folder)
    cold = {name: ask(engine, name) for name in ("base", "old", "new")}
    warm = {name: ask(engine, name) for name in ("base", "old", "new")}
    for name, weights in {version.name: version.weights_id for version in engine.versions.list()}.items():
        assert cold[name].usage.cached_tokens == 0
        assert warm[name].usage.cached_tokens == REUSED
        assert {span.weights_id for span in warm[name].usage.spans} == {weights}
        assert warm[name].choices[0].token_ids == cold[name].choices[0].token_ids
    assert len({completion.choices[0].token_ids for completion in cold.values()}) == 3, "the weights differ"


def test_keys_differ_from_process_to_process(tmp_path: Path) -> None:
    """Python's hashes do, unless their seed is fixed; a second process then finds nothing."""
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.memory.kv.common import identity, kv_of, open_store, prompt, restore\n"
        "ids = prompt(96)\n"
        "with open_store(Path(sys.argv[1]), ram_bytes=0) as store:\n"
        "    found = restore(store, ids); store.save(identity(), ids, kv_of(ids)); assert store.flush(60)\n"
        "    print(found, hash('kvloop'), *(chunk.key.hex() for chunk in store.match(identity(), ids).chunks))"
    )
    lines = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        lines.append(done.stdout.split())
    first, second = lines
    assert first[1] != second[1], "the seeds differ"
    assert (first[0], second[0]) == ("0", "96")
    assert first[2:] == second[2:]


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_a_restart_reuses_nothing_and_orphans_the_files(tmp_path: Path, index: str) -> None:
    with open_store(tmp_path) as store:
        store.save(identity(), IDS, kv_of(IDS))
    files = chunk_files(tmp_path)
    if index == "lost":
        for path in tmp_path.glob("index.db*"):
            path.unlink()
    with open_store(tmp_path, ram_bytes=0) as store:
        assert restore(store, IDS) == len(IDS)
        assert store.stats().disk.chunks == len(files) == 3
        assert store.stats().disk.bytes == bytes_on_disk(tmp_path)
        store.clear()
        assert chunk_files(tmp_path) == [], "every file belongs to something that can be deleted"


def test_the_disk_budget_is_forgotten_at_a_restart(tmp_path: Path) -> None:
    budget = 40_000
    for run in range(4):
        with open_store(tmp_path, disk_bytes=budget) as store:
            assert store.stats().disk.bytes == bytes_on_disk(tmp_path), "counting goes on where it was"
            for seed in range(5):
                ids = prompt(3 * CHUNK, seed=10 * run + seed)
                store.save(identity(), ids, kv_of(ids))
                assert store.flush(PATIENCE)
                assert bytes_on_disk(tmp_path) <= budget
    assert bytes_on_disk(tmp_path) > budget // 2, "the budget is used"
    with open_store(tmp_path, disk_bytes=budget // 4):
        assert bytes_on_disk(tmp_path) <= budget // 4, "a smaller budget holds from the start"


def test_a_store_that_failed_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not reach the disk is not found, by this process or the next, and what comes later is whole."""
    real = os.fsync

    def fails(descriptor: int) -> None:
        if ".kv" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    with open_store(tmp_path, ram_bytes=0) as store:
        monkeypatch.setattr(files_module.os, "fsync", fails)
        store.save(identity(), IDS, kv_of(IDS))
        assert store.flush(PATIENCE)
        assert store.stats().write_errors > 0
        assert store.match(identity(), IDS).tokens == 0
        with open_store(tmp_path, ram_bytes=0) as other:
            assert other.match(identity(), IDS).tokens == 0
        monkeypatch.undo()
        assert chunk_files(tmp_path) == []
        store.save(identity(), IDS, kv_of(IDS))
        assert store.flush(PATIENCE)
        assert restore(store, IDS) == len(IDS)


@pytest.mark.parametrize("encryption", [True, False])
@pytest.mark.parametrize("wrong", ["another chunk's file", "zeros", "another payload"])
def test_bytes_of_the_right_length_but_wrong_are_taken(tmp_path: Path, wrong: str, encryption: bool) -> None:
    other = prompt(CHUNK, seed=1)
    with open_store(tmp_path, ram_bytes=0, encryption=encryption) as store:
        store.save(identity(), other, kv_of(other))
        assert store.flush(PATIENCE)
        stranger = chunk_files(tmp_path)[0]
        ids = IDS[:CHUNK]
        store.save(identity(), ids, kv_of(ids))
        assert store.flush(PATIENCE)
        file = next(path for path in chunk_files(tmp_path) if path != stranger)
        whole, foreign = file.read_bytes(), stranger.read_bytes()
        assert len(whole) == len(foreign)
        half = len(whole) // 2
        changed = {
            "another chunk's file": foreign,
            "zeros": bytes(len(whole)),
            "another payload": whole[:half] + foreign[half:],
        }
        file.write_bytes(changed[wrong])
        assert restore(store, ids) == 0
        assert store.stats().quarantined == 1, "and that is told"
        assert restore(store, other) == CHUNK


def test_a_file_system_that_stalls_blocks_serving_for_ever(tmp_path: Path) -> None:
    """One file never comes, as on a dead network disk, and somebody holds the lock; requests go on."""
    hot = prompt(2 * CHUNK, seed=1)
    with open_store(tmp_path, ram_bytes=0, load_threads=2, encryption=False) as store:
        store.save(identity(), IDS, kv_of(IDS))
    store = open_store(tmp_path, stall_seconds=0.2, lock_seconds=0.2, load_threads=2, encryption=False)
    pipes = chunk_files(tmp_path)
    for path in pipes:
        path.unlink()
        os.mkfifo(path)  # opening it waits for a writer that never comes
    answers: list[int] = []

    def serve() -> None:
        match = store.match(identity(), IDS)
        out = np.zeros(identity().shape(len(IDS)), identity().dtype)
        answers.append(store.load(identity(), match, out))
        store.save(identity(), hot, kv_of(hot))
        answers.append(restore(store, hot))
        store.close()

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    serving.join(PATIENCE)
    try:
        assert not serving.is_alive(), "it hangs with the disk"
        assert answers == [0, len(hot)]
    finally:
        for path in pipes:
            if path.is_fifo():
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # lets who still waits go


def test_a_restore_succeeds_and_nothing_is_reused(start: Callable[..., Engine]) -> None:
    """What the usage calls cached was not computed: the engine's own count of computed tokens says the same."""
    first = start()
    cold = ask(first)
    assert first.load_now.computed_tokens >= len(QUESTION)
    first.close()
    second = start()
    warm = ask(second)
    assert warm.usage.disk_tokens == REUSED
    assert second.load_now.computed_tokens <= len(QUESTION) - REUSED + GREEDY.max_tokens
    assert second.memory is not None
    assert second.memory.stats().store.disk_tokens == REUSED
    assert warm.choices[0].token_ids == cold.choices[0].token_ids


def test_the_history_is_tokenised_differently_on_its_way_back(tmp_path: Path, model_dir: Path) -> None:
    """A reply of tokens that its text would never give: the next prompt begins with the very tokens of this one."""
    codec = TextCodec(model_dir)
    letters = [token for letter in "Hello" for token in codec.encode_plain(letter)]
    assert letters != codec.encode_plain("Hello")
    worker = FakeWorker(lambda body: [*letters, END])
    worker.start()
    gateway = RunningGateway(gateway_settings(tmp_path, model_dir, worker.url))
    gateway.start()
    try:
        messages = [{"role": "user", "content": "Hi"}]
        with gateway.client() as client:
            for _ in range(2):
                reply = client.chat.completions.create(model="kvloop", messages=messages)  # type: ignore[call-overload]
                said = reply.choices[0].message.content
                assert said == "Hello"
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
        first, second = (body["prompt"] for body in worker.seen.bodies)
        known = [*first, *letters]
        assert second[: len(known)] == known
    finally:
        gateway.stop()
        worker.stop()


def test_other_code_for_the_same_prompt_gives_other_numbers(start: Callable[..., Engine]) -> None:
    """Warm and cold differ in a last bit where they compute in other shapes. So: the restored tensors are bit for bit
    the computed ones, and the logits are those of a control that computes in the same shapes without any memory."""
    engine = start()
    ask(engine)
    identity_here = identity_of(engine.versions.base, "")
    decoder = engine.versions.base.decoder
    control = decoder.new_kv(len(QUESTION))
    with torch.inference_mode():
        decoder.forward([Run(QUESTION, 0, control)])
    assert engine.memory is not None
    store = engine.memory.store
    match = store.match(identity_here, QUESTION[:REUSED])
    restored = np.empty(identity_here.shape(REUSED), identity_here.dtype)
    assert store.load(identity_here, match, restored) == REUSED
    assert np.array_equal(restored, as_array(control)[:, :, :, :REUSED])

    warm = ask(engine)
    assert warm.usage.cached_tokens == REUSED
    again = decoder.new_kv(len(QUESTION))
    with torch.inference_mode():
        again[:, :, :, :REUSED] = control[:, :, :, :REUSED]
        hidden = decoder.forward([Run(QUESTION[REUSED:], REUSED, again)])
        logprobs = decoder.logits(hidden[-1:]).log_softmax(-1)[0]
    token = warm.choices[0].token_ids[0]
    assert token == int(logprobs.argmax())
    assert warm.choices[0].logprobs[0].logprob == float(logprobs[token])


MACHINES = {
    "a fast disk": (1000.0, 1.5e9, 3e-4),
    "a slow disk": (1000.0, 2e7, 1e-2),
    "a fast model": (50_000.0, 5e8, 1e-3),
    "a network disk": (3000.0, 1e8, 3e-2),
}
"""Prompt tokens a second, bytes a second, seconds for each file."""


@pytest.mark.parametrize("machine", MACHINES)
def test_loading_a_short_prompt_takes_longer_than_computing_it(machine: str) -> None:
    """From 64 to 8,192 tokens the choice is never more than 5% slower than the better of the two pure ones."""
    speed, bandwidth, opening = MACHINES[machine]
    cost = CostModel()

    def match_of(tokens: int) -> Match:
        refs = []
        for start in range(0, tokens, 256):
            part = min(256, tokens - start)
            fields: dict[str, Any] = dict.fromkeys(ChunkRef.__slots__)
            fields |= {"start": start, "tokens": part, "size": 16_000 * part, "tier": "disk", "codec": "exact"}
            refs.append(ChunkRef(**fields))
        return Match(tuple(refs))

    def load_seconds(match: Match) -> float:
        return sum(opening + chunk.size / bandwidth for chunk in match.chunks)

    for _ in range(30):  # as measured while serving
        for tokens in (64, 200, 512, 1024, 4000):
            match = match_of(tokens)
            cost.observe_load([("disk", "exact", chunk.size) for chunk in match.chunks], load_seconds(match))
            for start in range(0, tokens, 512):
                step = min(512, tokens - start)
                cost.observe_prefill(step, step / speed, start)
    for tokens in (64, 100, 256, 500, 1000, 2048, 5000, 8192):
        total = tokens + 20
        match = match_of(tokens)
        for _ in range(20):
            cut = cost.tokens_to_load(match, total)
            chosen = load_seconds(match.limited(cut)) + (total - cut) / speed
            pure = min(total / speed, load_seconds(match) + (total - tokens) / speed)
            assert chosen <= 1.05 * pure or cut == tokens, (tokens, cut)
        chosen_often = [cost.tokens_to_load(match, total) for _ in range(50)]
        spent = sum(load_seconds(match.limited(cut)) + (total - cut) / speed for cut in chosen_often)
        assert spent <= 1.05 * 50 * pure, "also with what exploring costs"


def test_another_tenants_prefix_is_visible_in_usage_and_timing(start: Callable[..., Engine]) -> None:
    """A tenant that asks what another has asked gets what a stranger's question gets: no hit, and the same work."""
    engine = start()
    memory = engine.memory
    assert memory is not None
    stranger = ask(engine, salt="ann")
    before, computed = memory.stats().store, engine.load_now.computed_tokens
    probe = ask(engine, salt="bob")
    after = memory.stats().store
    assert replace(probe.usage, ttft_ms=None) == replace(stranger.usage, ttft_ms=None)
    assert engine.load_now.computed_tokens - computed == computed, "all of it was computed"
    assert after.hits == before.hits == 0
    assert after.restored_tokens == before.restored_tokens == 0
    assert after.shared_tokens == before.shared_tokens == 0
    assert after.disk.chunks == 2 * before.disk.chunks, "nor does saving tell: nothing is shared"
    assert ask(engine, salt="ann").usage.cached_tokens == REUSED


def test_there_is_no_way_to_clear_or_delete(start: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start()
    ask(engine, owner="one")
    ask(engine, salt="tenant", owner="two")
    store = engine.memory.store if engine.memory is not None else None
    assert isinstance(store, KVStore)
    files = len(chunk_files(tmp_path / "kv"))
    gone = engine.forget(["one"], "")
    assert gone.disk == files // 2
    assert len(chunk_files(tmp_path / "kv")) == files - gone.disk
    assert ask(engine).usage.cached_tokens == 0, "deleted"
    assert ask(engine, salt="tenant").usage.cached_tokens == REUSED, "others' stays"
    store.clear()
    assert chunk_files(tmp_path / "kv") == []
    assert (store.stats().ram.chunks, store.stats().disk.bytes) == (0, 0)
    assert ask(engine, salt="tenant").usage.cached_tokens == 0, "cleared"
