"""`/v1/kv/...`: what KV memory forgets, what replaced KV would cost, what each rung costs, and what is stored."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter

from serve.engine.divergence import Divergences
from serve.engine.engine import Engine
from serve.engine.errors import EngineError
from serve.worker.protocol import DivergenceBody, ForgetBody, MeasureBody

Json = dict[str, Any]
Answer = TypeVar("Answer")


def memory_router(engine: Engine) -> APIRouter:
    """The endpoints, for the memory of `engine`."""
    router = APIRouter(prefix="/v1/kv")

    @router.post("/forget")
    async def forget(body: ForgetBody) -> Json:
        gone = await asyncio.to_thread(engine.forget, body.owners, body.cache_salt)
        return {"object": "kv.forgotten", **asdict(gone)}

    @router.post("/divergence")
    async def divergence(body: DivergenceBody) -> Json:
        found = await in_thread(
            lambda: engine.probing.divergence(
                body.model, body.prompts, body.prefixes, body.codecs, body.versions, body.answer_tokens
            )
        )
        return divergence_json(body, found)

    @router.post("/measure")
    async def measure(body: MeasureBody) -> Json:
        records = await in_thread(engine.probing.measure)
        return {"object": "kv.measured", "records": [asdict(record) for record in records]}

    @router.get("/report")
    async def report() -> Json:
        return await asyncio.to_thread(report_json, engine)

    return router


def divergence_json(body: DivergenceBody, found: Divergences) -> Json:
    """What was found of each codec and version, and what rounding alone does."""
    return {
        "object": "kv.divergence",
        "model": body.model,
        "noise": {"kl_mean": found.noise},
        "codecs": {name: asdict(found.variants[f"codec {name}"]) for name in body.codecs},
        "versions": {name: asdict(found.variants[f"version {name}"]) for name in body.versions},
    }


def report_json(engine: Engine) -> Json:
    """What is stored, what each rung was measured to cost, what the cost model thinks, what upkeep did."""
    if engine.memory is None:
        return {"object": "kv.report", "holdings": [], "records": [], "stats": None, "costs": {}, "upkeep": None}
    store = engine.memory.store
    return {
        "object": "kv.report",
        "holdings": [asdict(holding) for holding in store.report()],
        "records": [asdict(record) for record in store.fidelity.all()],
        "stats": asdict(engine.memory.stats()),
        "costs": store.cost.costs(),
        "upkeep": asdict(store.upkeep.stats()) if store.upkeep is not None else None,
    }


async def in_thread(work: Callable[[], Answer]) -> Answer:
    """Waits for `work` in a thread of its own, which does not keep the process from ending."""
    done: Future[Answer] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
            if not isinstance(error, EngineError):
                raise

    threading.Thread(target=run, name="probing", daemon=True).start()
    return await asyncio.wrap_future(done)
