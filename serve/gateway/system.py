"""What runs and which version serves: models, health, metrics, status, and the internal API that changes versions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve.gateway.bodies import ActivateBody, read_body
from serve.gateway.errors import not_found
from serve.gateway.service import Gateway


async def models(request: Request) -> Response:
    """The name that always serves the champion, the base, and every resident version."""
    gateway: Gateway = request.app.state.gateway
    gateway.auth.tenant(request)
    return JSONResponse({"object": "list", "data": [_model(name, gateway) for name in gateway.versions.names()]})


async def model(request: Request) -> Response:
    """One model."""
    gateway: Gateway = request.app.state.gateway
    gateway.auth.tenant(request)
    name = request.path_params["model"]
    if name not in gateway.versions.names():
        raise not_found(f"The model '{name}' does not exist.", "model", "model_not_found")
    return JSONResponse(_model(name, gateway))


async def health(request: Request) -> Response:
    """200 while the gateway runs; says how many workers answer."""
    gateway: Gateway = request.app.state.gateway
    up = sum(worker.up for worker in gateway.router.workers)
    return JSONResponse({"status": "ok", "workers": len(gateway.router.workers), "workers_up": up})


async def metrics(request: Request) -> Response:
    """Prometheus exposition."""
    gateway: Gateway = request.app.state.gateway
    return Response(gateway.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def status(request: Request) -> Response:
    """What serves, what is resident, and how busy the workers are."""
    gateway: Gateway = request.app.state.gateway
    gateway.auth.tenant(request)
    workers = [{"url": worker.url, "up": worker.up, "in_flight": worker.in_flight} for worker in gateway.router.workers]
    codec = {"context_length": gateway.context_length, "tokenizer": gateway.codec.digest}
    return JSONResponse(gateway.versions.status() | {"workers": workers, **codec})


async def activate(request: Request) -> Response:
    """Loads, proves and flips a version."""
    gateway: Gateway = request.app.state.gateway
    gateway.auth.check_admin(request)
    body = await read_body(request, ActivateBody)
    return JSONResponse(await gateway.versions.activate(body))


async def versions(request: Request) -> Response:
    """The resident versions, and the latest changes."""
    gateway: Gateway = request.app.state.gateway
    gateway.auth.check_admin(request)
    ledger = await gateway.threads.run(gateway.journal.list_promotions, 20)
    moves: list[dict[str, Any]] = [
        {"at": move.at, "who": move.who, "action": move.action, "from": move.from_version, "to": move.to_version,
         "reason": move.reason, "report": move.report, "seconds": move.seconds}
        for move in ledger
    ]  # fmt: skip
    return JSONResponse(gateway.versions.status() | {"ledger": moves})


async def refresh(request: Request) -> Response:
    """How far the refreshes of sessions under the version that serves are."""
    gateway: Gateway = request.app.state.gateway
    gateway.auth.check_admin(request)
    return JSONResponse(await gateway.refresher.status())


def _model(name: str, gateway: Gateway) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": gateway.versions.since, "owned_by": "kvloop"}
