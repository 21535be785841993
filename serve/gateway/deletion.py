"""Deleting a session: its KV first, then its words, so that nobody is told "deleted" while bytes remain.

Invariants: no turn runs in a session that goes, or from a reply in it, until it is gone, so nothing brings its KV back;
where KV memory could not be made to forget, nothing is deleted and the client may try again; what could not be asked
is in the receipt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memory.journal.errors import NotFound
from memory.journal.journal import Journal
from memory.journal.records import Response
from serve.backends.base import NotSupported, WorkerError, WorkerUnavailable
from serve.backends.router import Worker
from serve.gateway.errors import ApiError, conflict, not_found, unavailable
from serve.gateway.logs import event
from serve.gateway.service import Gateway
from serve.gateway.turns import stored_ids

Json = dict[str, Any]


@dataclass(frozen=True)
class _Doomed:
    """Token ids as a model saw them, up to a reply's beginning or end; the first `keep` belong to others as well."""

    ids: list[int]
    keep: int


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
            doomed = await gateway.threads.run(lambda: list(_sequences(gateway.journal, replies)))
            memory = await _forget(gateway, doomed, gateway.auth.cache_salt(tenant)) if doomed else []
            receipt = await gateway.threads.run(gateway.journal.delete_session, tenant, session_id)
        finally:
            busy.open(tenant, sessions)
    except NotFound as error:
        raise not_found(f"Session '{session_id}' was not found.", "session_id") from error
    return {
        "deleted_at": receipt.deleted_at, "sessions": list(receipt.sessions), "responses": receipt.responses,
        "feedback": receipt.feedback, "datasets": list(receipt.datasets), "versions": list(receipt.versions),
        "kv": memory,
    }  # fmt: skip


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


def _sequences(journal: Journal, replies: Sequence[Response]) -> Iterator[_Doomed]:
    """For each reply the ids up to its beginning and to its end: turns that were given up went on from there too."""
    known: dict[str, _Doomed] = {}
    for reply in replies:
        parent = reply.parent_response
        if reply.params.get("rerendered") or parent is None:
            before = _Doomed([], 0)
        elif parent in known:
            before = known[parent]
        else:  # a reply of a session that stays: its words are not ours to forget
            ids = stored_ids(journal.chain(parent))
            before = _Doomed(ids, len(ids))
        asked = _Doomed(before.ids + reply.input_ids, before.keep)
        known[reply.id] = _Doomed(asked.ids + reply.output_ids, before.keep)
        yield asked
        yield known[reply.id]


async def _forget(gateway: Gateway, doomed: Sequence[_Doomed], cache_salt: str) -> list[Json]:
    """Makes every worker forget. Raises `ApiError` 503 when one failed, or when none that can do it could be asked."""
    prompts, keep = [entry.ids for entry in doomed], [entry.keep for entry in doomed]

    async def ask(worker: Worker) -> Json:
        told: Json = {"worker": worker.url, "status": "forgotten", "chunks": None}
        try:
            told["chunks"] = dict(await worker.client.forget(prompts, keep, cache_salt))
        except NotSupported:
            told["status"] = "not_supported"
        except WorkerUnavailable:
            told["status"] = "unreachable"
        except WorkerError as error:
            event("a worker did not forget", worker=worker.url, reason=str(error))
            told["status"] = "failed"
        return told

    told = await asyncio.gather(*(ask(worker) for worker in gateway.router.workers))
    states = {entry["status"] for entry in told}
    if "failed" in states or ("unreachable" in states and "forgotten" not in states):
        raise unavailable("KV memory could not be made to forget, so nothing was deleted: try again.")
    return list(told)
