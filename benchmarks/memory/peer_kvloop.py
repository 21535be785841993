"""kvloop's engine with its KV memory, as a request meets them: queue, look-up, decryption, proof, decoding and all."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

from peer_process import WARM_UP, Config, run

from memory.kv.settings import KVSettings
from serve.engine import load_engine
from serve.engine.engine import Engine
from serve.engine.request import Event, FailedEvent, KVOptions, Request, Sampling, TokenEvent
from serve.engine.settings import EngineSettings


def start(config: Config) -> Engine:
    engine = load_engine(
        EngineSettings(
            model=Path(config["model"]), threads=1, kv_folder=Path(config["store"]), kv=KVSettings(**config["kv"])
        )
    )
    sampling = Sampling(max_tokens=2, temperature=0, ignore_eos=True)
    engine.generate([Request("base", tuple(WARM_UP), sampling, kv=KVOptions(save=False))])
    return engine


def save(config: Config) -> None:
    engine = start(config)
    engine.generate([Request("base", tuple(config["history"]), Sampling(max_tokens=1, temperature=0))])
    if engine.memory is None or not engine.memory.flush(120):
        raise RuntimeError("the session was not stored in time")
    engine.close()


def prepare(config: Config) -> Callable[[], tuple[int, int]]:
    engine = start(config)

    def resume() -> tuple[int, int]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        prompt = tuple(config["history"] + config["turn"])
        engine.submit([Request("base", prompt, Sampling(max_tokens=1, temperature=0))], events.put)
        first = events.get()
        if isinstance(first, FailedEvent):
            raise first.error
        assert isinstance(first, TokenEvent)
        assert first.usage is not None
        return first.usage.cached_tokens, first.token_id

    return resume


if __name__ == "__main__":
    run(save, prepare)
