"""Deleting sessions and memories: their KV first, then their words, so that nobody hears "deleted" while bytes remain.

Invariants: no turn runs in what goes, or from it, until it is gone, and no refresh or prefetch of it either, so nothing
brings its KV back; where KV memory could not be made to forget, nothing is deleted and the client may try again; what
could not be asked is in the receipt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from memory.journal.errors import NotFound
from memory.journal.records import Response
from serve.gateway.errors import ApiError, conflict, not_found
from serve.gateway.forget import forget
from serve.gateway.logs import event
from serve.gateway.service import Gateway
from serve.gateway.turns import gone_error

Json = dict[str, Any]
_LOOK_SECONDS = 0.05


async def delete_session(gateway: Gateway, tenant: str, session_id: str, only: str | None = None) -> Json:
    """Removes a session, and the forks that hold its words, from every worker's KV memory and from the journal.

    Returns the receipt. Raises `ApiError`: 404, 409 while a turn runs in one of them or where `only` is given and is
    not the session's only reply, 503 when KV memory did not forget.
    """
    busy = gateway.turns.busy
    try:
        sessions, _ = await gateway.threads.run(gateway.journal.doomed_with, tenant, session_id)
        if not busy.close(tenant, sessions):
            raise _busy(session_id)
        try:
            again, replies = await gateway.threads.run(gateway.journal.doomed_with, tenant, session_id)
            if again != sessions:
                raise _busy(session_id)  # somebody forked it just now
            if only is not None:
                _check_alone(only, session_id, replies)
            await gateway.refresher.stop(tenant, sessions)
            owners = [gateway.auth.kv_owner("session", tenant, name) for name in sessions]
            told = await forget(gateway.router, owners, gateway.auth.cache_salt(tenant))
            receipt = await gateway.threads.run(gateway.journal.delete_session, tenant, session_id)
        finally:
            busy.open(tenant, sessions)
    except NotFound as error:
        raise not_found(f"Session '{session_id}' was not found.", "session_id") from error
    return {
        "deleted_at": receipt.deleted_at, "sessions": list(receipt.sessions), "responses": receipt.responses,
        "feedback": receipt.feedback, "datasets": list(receipt.datasets), "versions": list(receipt.versions),
        "kv": told,
    }  # fmt: skip


async def delete_memory(gateway: Gateway, tenant: str, memory_id: str) -> Json:
    """Removes a memory, and all KV that was computed over it: its own and that of the sessions that attach it.

    Returns the receipt. From its beginning no turn starts that uses the memory; those that run are waited for. Raises
    `ApiError`: 404 or 410 where there is none, 409 when turns did not end in time, 503 when KV memory did not forget.
    """
    if not gateway.turns.busy.shut(tenant, memory_id):
        raise conflict(f"Memory '{memory_id}' is being deleted.", "memory_busy")
    try:
        combinations = await gateway.threads.run(gateway.journal.memory_prefixes, tenant, memory_id)
        await gateway.prefetch.stop(tenant, memory_id)
        await _quiet(gateway, tenant, memory_id)
        sessions = await gateway.threads.run(gateway.journal.memory_sessions, tenant, memory_id)
        await gateway.refresher.stop(tenant, sessions)
        owner = gateway.auth.kv_owner
        owners = [owner("memory", tenant, *ids) for ids in dict.fromkeys([(memory_id,), *combinations])]
        owners += [owner("session", tenant, name) for name in sessions]
        told = await forget(gateway.router, owners, gateway.auth.cache_salt(tenant))
        receipt = await gateway.threads.run(gateway.journal.delete_memory, tenant, memory_id)
    except NotFound as error:
        raise gone_error(error) from error
    finally:
        gateway.turns.busy.open(tenant, [memory_id])
    return {
        "deleted_at": receipt.deleted_at, "sessions": list(receipt.sessions), "datasets": list(receipt.datasets),
        "versions": list(receipt.versions), "kv": told,
    }  # fmt: skip


async def sweep(gateway: Gateway, pause: float) -> None:
    """Runs for ever: deletes sessions and memories whose time is over. What cannot be deleted now is tried again."""
    while True:
        try:
            for tenant, name in await gateway.threads.run(gateway.journal.expired_sessions):
                if await _swept(name, delete_session(gateway, tenant, name)):
                    gateway.metrics.expired.labels("session").inc()
            for tenant, name in await gateway.threads.run(gateway.journal.expired_memories):
                if await _swept(name, delete_memory(gateway, tenant, name)):
                    gateway.metrics.expired.labels("memory").inc()
        except ApiError as error:
            event("sweeping failed", level=logging.WARNING, reason=error.message)
        except Exception as error:  # noqa: BLE001  (a defect here must not end sweeping for good)
            event("sweeping failed", level=logging.ERROR, error=error)
        await asyncio.sleep(pause)


async def _swept(name: str, deletion: Any) -> bool:
    try:
        await deletion
    except ApiError as error:
        if error.status != 404:  # not deleted by somebody else meanwhile, or with what it was forked from
            event("an expired record stays for now", level=logging.WARNING, record=name, reason=error.message)
        return False
    return True


async def _quiet(gateway: Gateway, tenant: str, memory_id: str) -> None:
    deadline = time.monotonic() + gateway.settings.memory_delete_seconds
    while not gateway.turns.busy.quiet(tenant, memory_id):
        if time.monotonic() >= deadline:
            raise conflict(f"Turns that use memory '{memory_id}' still run; delete it afterwards.", "memory_busy")
        await asyncio.sleep(_LOOK_SECONDS)


def _busy(session_id: str) -> ApiError:
    return conflict(
        f"A turn is running in session '{session_id}' or in a fork of it; delete it afterwards.", "session_busy"
    )


def _check_alone(response_id: str, session_id: str, replies: Sequence[Response]) -> None:
    mine = [reply for reply in replies if reply.session_id == session_id]
    if any(reply.id != response_id or reply.parent_response is not None for reply in mine):
        raise conflict(
            f"Response '{response_id}' is one of several in session '{session_id}', whose memory is made of them: "
            f"delete the session (DELETE /v1/sessions/{session_id}).", "response_in_session",
        )  # fmt: skip
