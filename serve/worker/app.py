"""The worker's HTTP application: completions, adapters, models, health, metrics."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse

from serve.engine.engine import Engine
from serve.engine.errors import EngineError
from serve.engine.versions import Version
from serve.worker.completions import completions_router
from serve.worker.errors import on_engine_error, on_invalid_body
from serve.worker.memory import memory_router
from serve.worker.metrics import WorkerMetrics
from serve.worker.protocol import LoadAdapterBody, UnloadAdapterBody


def create_app(engine: Engine, max_prompts: int) -> FastAPI:
    """Returns the application that serves with `engine`, which stays the caller's to close."""
    app = FastAPI(title="kvloop worker", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = WorkerMetrics(engine)
    app.add_exception_handler(EngineError, on_engine_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.include_router(completions_router(engine, metrics, max_prompts))
    app.include_router(_versions_router(engine))
    app.include_router(memory_router(engine))
    app.include_router(_state_router(engine, metrics))
    return app


def _versions_router(engine: Engine) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.post("/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapterBody) -> PlainTextResponse:
        version = await asyncio.to_thread(engine.load_adapter, body.lora_name, body.lora_path)
        return PlainTextResponse(f"adapter {version.name} is loaded; weights id {version.weights_id}")

    @router.post("/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapterBody) -> PlainTextResponse:
        running = engine.unload_adapter(body.lora_name)
        ending = f"; its memory is freed when {running} requests have ended" if running else ""
        return PlainTextResponse(f"adapter {body.lora_name} is unloaded{ending}")

    @router.get("/models")
    async def models() -> dict[str, Any]:
        base, *adapters = engine.versions.list()
        cards = [_card(base, None), *(_card(adapter, base.name) for adapter in adapters)]
        return {"object": "list", "data": [{**card, "max_model_len": engine.context} for card in cards]}

    return router


def _card(version: Version, parent: str | None) -> dict[str, Any]:
    return {
        "id": version.name,
        "object": "model",
        "owned_by": "kvloop",
        "root": str(version.path),
        "parent": parent,
        "weights_id": version.weights_id,
    }


def _state_router(engine: Engine, metrics: WorkerMetrics) -> APIRouter:
    router = APIRouter()
    boot_id = secrets.token_hex(8)

    @router.get("/health")
    async def health() -> JSONResponse:
        alive = engine.alive
        state = {
            "status": "ok" if alive else "the engine has ended",
            "boot_id": boot_id,
            "model": engine.versions.base.name,
            "context_length": engine.context,
        }
        return JSONResponse(state, 200 if alive else 503)

    @router.get("/metrics")
    async def prometheus() -> Response:
        text = await asyncio.to_thread(metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
