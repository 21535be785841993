"""Where a turn continues from, and how it is kept. Token ids are the truth: history is looked up, never re-tokenised.

Invariants: the prompt of a turn begins with the exact ids of the turn it continues; only the new messages (and, when
the tokenizer itself changed, everything) are encoded; one turn at a time runs in a session, and a second one is refused
where the client named the session, or becomes a fork where it was only recognised by its history; `commit` returns
when the turn is on disk. Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memory.journal.errors import Conflict, NotFound
from memory.journal.journal import Journal
from memory.journal.records import NewResponse, Response
from serve.gateway.errors import conflict, invalid, not_found
from serve.gateway.text import TextCodec

Json = dict[str, Any]
History = Literal["new", "session", "previous", "resend"]

# A client may resend a long history that was never seen here; looking further back than this only costs time.
_BOUNDARIES = 32


class Busy:
    """The sessions in which a turn runs, those whose replies a running turn goes on from, and those that are being
    deleted, by tenant and id. Thread-safe."""

    def __init__(self) -> None:
        self._held: set[tuple[str, str]] = set()
        self._read: Counter[tuple[str, str]] = Counter()
        self._closed: set[tuple[str, str]] = set()
        self._guard = threading.Lock()

    def acquire(self, tenant: str, session_id: str) -> bool:
        """Whether the session was free and is now held."""
        with self._guard:
            if (tenant, session_id) in self._held | self._closed:
                return False
            self._held.add((tenant, session_id))
            return True

    def release(self, tenant: str, session_id: str) -> None:
        """Frees a session; harmless when it is free."""
        with self._guard:
            self._held.discard((tenant, session_id))

    def read(self, tenant: str, session_id: str) -> bool:
        """Whether a turn may go on from a reply of the session; it is not deleted until `done_reading`."""
        with self._guard:
            if (tenant, session_id) in self._closed:
                return False
            self._read[tenant, session_id] += 1
            return True

    def done_reading(self, tenant: str, session_id: str) -> None:
        """Once for each `read` that was granted."""
        with self._guard:
            self._read[tenant, session_id] -= 1
            self._read += Counter()  # drops zeros

    def close(self, tenant: str, sessions: Iterable[str]) -> bool:
        """Whether nothing runs in these sessions or from them; nothing can begin to then until `open`."""
        wanted = {(tenant, session_id) for session_id in sessions}
        with self._guard:
            if wanted & (self._held | self._closed | self._read.keys()):
                return False
            self._closed |= wanted
            return True

    def open(self, tenant: str, sessions: Iterable[str]) -> None:
        """Ends `close`."""
        with self._guard:
            self._closed -= {(tenant, session_id) for session_id in sessions}


class _Hold:
    """What one plan holds while it is made: at most one session to run in, and one to go on from."""

    def __init__(self, busy: Busy, tenant: str) -> None:
        self._busy = busy
        self._tenant = tenant
        self._session: str | None = None
        self._reads: str | None = None

    def take(self, session_id: str) -> bool:
        """Whether the session was free and is now held."""
        free = self._busy.acquire(self._tenant, session_id)
        if free:
            self._session = session_id
        return free

    def read(self, session_id: str) -> None:
        """Keeps a session from being deleted. Raises `ApiError` 409 when it is being deleted."""
        if not self._busy.read(self._tenant, session_id):
            raise conflict(f"Session '{session_id}' is being deleted.", "session_busy")
        self._reads = session_id

    def drop(self) -> None:
        """Frees what is held."""
        if self._session is not None:
            self._busy.release(self._tenant, self._session)
        if self._reads is not None:
            self._busy.done_reading(self._tenant, self._reads)
        self._session = self._reads = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a client asked for, whichever API it used."""

    tenant: str
    messages: list[Json]
    store: bool
    user: str = ""
    session_id: str | None = None
    previous_response_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One turn. `session_id` is None only when nothing is kept and the client named no session."""

    asked: Asked
    found: History
    session_id: str | None
    create: bool
    """Whether `commit` must create the session first (a new one, or a fork of `fork_of`)."""
    fork_of: str | None
    parent: str | None
    reads: str | None = None
    """The session of `parent`, where the turn keeps it from being deleted."""
    history: list[Json]
    """All messages before the new ones."""
    new: list[Json]
    known_ids: list[int]
    new_ids: list[int]
    rerendered: bool = False

    @property
    def prompt(self) -> list[int]:
        """What the worker is given."""
        return self.known_ids + self.new_ids


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One choice of a finished turn, with what the worker said about it."""

    response_id: str
    text: str
    output_ids: list[int]
    finish_reason: str
    model: str
    weights_id: str
    cached_tokens: int
    restored_tokens: int
    computed_tokens: int
    generated_tokens: int
    fidelity: str
    spans: list[Json]
    ttft_ms: float | None
    duration_ms: float
    created_at: float
    params: Json = field(default_factory=dict)


class Turns:
    """Plans turns and keeps them."""

    def __init__(self, journal: Journal, codec: TextCodec) -> None:
        self._journal = journal
        self._codec = codec
        self.busy = Busy()

    def plan(self, asked: Asked) -> Plan:
        """Finds what the turn continues and encodes what is new. The session is held until `release(plan)`.

        Raises `ApiError`: 404 for what is not the tenant's, 409 for a busy session, 400 for what cannot be rendered.
        """
        hold = _Hold(self.busy, asked.tenant)
        try:
            return self._plan(asked, hold)
        except BaseException as error:
            hold.drop()
            if isinstance(error, NotFound):
                raise not_found(
                    f"{error.kind.capitalize()} '{error.name}' was not found.", f"{error.kind}_id"
                ) from error
            if isinstance(error, ValueError):
                raise invalid(f"{str(error)[:1].upper()}{str(error)[1:]}.", "messages") from error
            raise

    def release(self, plan: Plan) -> None:
        """Lets the next turn of the session run. Must be called once for each plan, whatever became of it."""
        if plan.asked.store and plan.session_id is not None:
            self.busy.release(plan.asked.tenant, plan.session_id)
        if plan.reads is not None:
            self.busy.done_reading(plan.asked.tenant, plan.reads)

    def commit(self, plan: Plan, replies: Sequence[Reply]) -> list[Response]:
        """Journals the choices of a turn; the session goes on from the first. On disk when this returns.

        Raises `ApiError` 409 when another turn was first, 404 when the session was deleted meanwhile.
        """
        tenant, session_id = plan.asked.tenant, plan.session_id
        if session_id is None:
            raise ValueError("a turn without a session cannot be kept")
        try:
            if plan.create:
                self._journal.create_session(tenant, session_id, head=plan.parent, parent=plan.fork_of)
            return self._journal.add_responses([self._record(plan, session_id, *entry) for entry in enumerate(replies)])
        except Conflict as error:
            raise conflict(f"The session moved on while this turn ran: {error}.", "session_conflict") from error
        except NotFound as error:
            raise not_found(f"{error.kind.capitalize()} '{error.name}' was deleted meanwhile.", "session_id") from error

    def _plan(self, asked: Asked, hold: _Hold) -> Plan:
        if asked.session_id is not None:
            return self._in_session(asked, asked.session_id, hold)
        if asked.previous_response_id is not None:
            parent = self._journal.get_response(asked.tenant, asked.previous_response_id)
            return self._after(asked, parent, asked.messages, "previous", hold)
        matched = self._match(asked)
        if matched is not None:
            parent, new = matched
            return self._after(asked, parent, new, "resend", hold)
        return self._first(asked, "new", new_session_id() if asked.store else None, create=True)

    def _in_session(self, asked: Asked, session_id: str, hold: _Hold) -> Plan:
        if asked.store and not hold.take(session_id):
            raise conflict(f"A turn is already running in session '{session_id}'.", "session_busy")
        session = self._journal.get_session(asked.tenant, session_id)
        if session.head_response is None:
            return self._first(asked, "session", session_id, create=False)
        head = self._journal.get_response(asked.tenant, session.head_response)
        matched = self._match(asked)
        if matched is not None and matched[0].session_id == session_id and matched[0].id != head.id:
            # The client went back to an earlier reply of this session: that is another conversation from there.
            return self._fork(asked, matched[0], matched[1], "session", hold)
        new = matched[1] if matched is not None and matched[0].id == head.id else asked.messages
        return self._continue(asked, head, new, "session", hold, session_id=session_id, create=False, fork_of=None)

    def _after(self, asked: Asked, parent: Response, new: list[Json], found: History, hold: _Hold) -> Plan:
        """Continues from a reply: in its session when it is the latest there and no turn runs, else in a fork."""
        if not asked.store:
            return self._continue(asked, parent, new, found, hold, session_id=None, create=False, fork_of=None)
        if hold.take(parent.session_id):
            session = self._journal.get_session(asked.tenant, parent.session_id)
            if session.head_response == parent.id:
                return self._continue(
                    asked, parent, new, found, hold, session_id=session.id, create=False, fork_of=None
                )
            hold.drop()
        return self._fork(asked, parent, new, found, hold)

    def _fork(self, asked: Asked, parent: Response, new: list[Json], found: History, hold: _Hold) -> Plan:
        hold.drop()
        session_id = new_session_id() if asked.store else None
        return self._continue(
            asked, parent, new, found, hold, session_id=session_id, create=asked.store, fork_of=parent.session_id
        )

    def _first(self, asked: Asked, found: History, session_id: str | None, *, create: bool) -> Plan:
        return Plan(
            asked=asked, found=found, session_id=session_id, create=create, fork_of=None, parent=None, history=[],
            new=asked.messages, known_ids=[], new_ids=self._codec.first_turn(asked.messages),
        )  # fmt: skip

    def _continue(
        self,
        asked: Asked,
        parent: Response,
        new: list[Json],
        found: History,
        hold: _Hold,
        *,
        session_id: str | None,
        create: bool,
        fork_of: str | None,
    ) -> Plan:
        if asked.store:  # else the worker keeps nothing of it either
            hold.read(parent.session_id)
        chain = self._journal.chain(parent.id)
        history = conversation(chain)
        new = _without_repeated_system(history, new)
        if not new:
            raise ValueError("there is no new message to answer")
        rerender = parent.params.get("tokenizer") != self._codec.digest
        if rerender:
            known, delta = [], self._codec.first_turn([*history, *new])
        else:
            known = stored_ids(chain)
            delta = self._codec.next_turn(history, new, known[-1])
        return Plan(
            asked=asked, found=found, session_id=session_id, create=create, fork_of=fork_of, parent=parent.id,
            reads=parent.session_id if asked.store else None, history=history,
            new=new, known_ids=known, new_ids=delta, rerendered=rerender,
        )  # fmt: skip

    def _match(self, asked: Asked) -> tuple[Response, list[Json]] | None:
        """The stored reply that the longest beginning of the messages ends with, and the messages after it."""
        replies = [at for at, message in enumerate(asked.messages) if message["role"] == "assistant"]
        for at in reversed(replies[-_BOUNDARIES:]):
            if at + 1 == len(asked.messages):
                continue
            digest = self._codec.history_digest(asked.messages[: at + 1], asked.user)
            found = self._journal.find_by_history(asked.tenant, digest)
            if found is not None:
                return found, asked.messages[at + 1 :]
        return None

    def _record(self, plan: Plan, session_id: str, index: int, reply: Reply) -> NewResponse:
        answer = {"role": "assistant", "content": reply.text}
        return NewResponse(
            id=reply.response_id,
            session_id=session_id,
            tenant=plan.asked.tenant,
            parent_response=plan.parent,
            input_messages=plan.new,
            output_message=answer,
            input_ids=plan.new_ids,
            output_ids=reply.output_ids,
            history_digest=self._codec.history_digest([*plan.history, *plan.new, answer], plan.asked.user),
            finish_reason=reply.finish_reason,
            model=reply.model,
            weights_id=reply.weights_id,
            cached_tokens=reply.cached_tokens,
            restored_tokens=reply.restored_tokens,
            computed_tokens=reply.computed_tokens,
            generated_tokens=reply.generated_tokens,
            fidelity=reply.fidelity,
            spans=reply.spans,
            params=reply.params | {"tokenizer": self._codec.digest, "rerendered": plan.rerendered},
            choice_index=index,
            ttft_ms=reply.ttft_ms,
            duration_ms=reply.duration_ms,
            created_at=reply.created_at,
        )


def new_session_id() -> str:
    """A session id nobody can guess."""
    return f"sess_{secrets.token_hex(16)}"


def new_response_id() -> str:
    """A response id nobody can guess."""
    return f"resp_{secrets.token_hex(16)}"


def conversation(chain: Sequence[Response]) -> list[Json]:
    """The messages of a chain of replies, oldest first."""
    return [message for response in chain for message in (*response.input_messages, response.output_message)]


def stored_ids(chain: Sequence[Response]) -> list[int]:
    """The token ids of a chain of replies, sampled ones included, as the model saw them."""
    token_ids: list[int] = []
    for response in chain:
        if response.params.get("rerendered"):
            token_ids = []
        token_ids += response.input_ids
        token_ids += response.output_ids
    return token_ids


def _without_repeated_system(history: Sequence[Json], new: list[Json]) -> list[Json]:
    """Clients that name a session often still send the same system message first; it is in the memory already."""
    if history and new and history[0]["role"] in ("system", "developer") and new[0] == history[0]:
        return new[1:]
    return new
