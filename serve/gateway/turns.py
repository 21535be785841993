"""Where a turn continues from, and how it is kept. Token ids are the truth: history is looked up, never re-tokenised.

Invariants: the prompt of a turn begins with the exact ids of the turn it continues, and before them those of the
memories that the session attaches, which are kept once and not with the turn; only the new messages (and, when
the tokenizer itself changed, everything) are encoded; one turn at a time runs in a session, and a second one is refused
where the client named the session, or becomes a fork where it was only recognised by its history; `commit` returns
when the turn is on disk. Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from memory.journal.errors import Conflict, Gone, NotFound
from memory.journal.journal import Journal
from memory.journal.records import MemoryPrefix, NewResponse, Response, Session, VersionMove
from serve.gateway.attach import MemoryTemplate
from serve.gateway.busy import Busy, Hold
from serve.gateway.errors import ApiError, conflict, gone, invalid, not_found
from serve.gateway.text import TextCodec

Json = dict[str, Any]
History = Literal["new", "session", "previous", "resend"]

# A client may resend a long history that was never seen here; looking further back than this only costs time.
_BOUNDARIES = 32
_FIELDS = {"session": "session_id", "response": "response_id", "memory": "memory_ids"}


def gone_error(error: NotFound, session_id: str | None = None) -> ApiError:
    """What a client is told of something that is not there, or not any more."""
    if not isinstance(error, Gone):
        return not_found(f"{error.kind.capitalize()} '{error.name}' was not found.", _FIELDS[error.kind])
    what = f"{error.kind.capitalize()} '{error.name}' {'was deleted' if error.why == 'deleted' else 'has expired'}"
    if session_id is None:
        return gone(f"{what}: create it again, or leave it out.", _FIELDS[error.kind])
    return gone(
        f"{what}, and session '{session_id}' attached it, so the session cannot go on: start a new session without "
        f"it, and delete this one (DELETE /v1/sessions/{session_id}).", "session_id",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a client asked for, whichever API it used."""

    tenant: str
    messages: list[Json]
    store: bool
    user: str = ""
    session_id: str | None = None
    previous_response_id: str | None = None
    memory_ids: tuple[str, ...] | None = None
    """None is whatever the session has; others are for a first turn."""


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
    reads: tuple[str, ...] = ()
    """What the turn keeps from being deleted: the memories, and where it is stored the session of `parent`."""
    origin: Session | None = None
    """The session that the turn continues, as it was; for a fork the one forked from."""
    memory: MemoryPrefix | None = None
    expires_at: float | None = None
    """When the session does."""
    history: list[Json]
    """All messages before the new ones."""
    new: list[Json]
    known_ids: list[int]
    new_ids: list[int]
    rerendered: bool = False

    @property
    def prompt(self) -> list[int]:
        """What the worker is given."""
        memories = [] if self.memory is None else self.memory.token_ids
        return [*memories, *self.known_ids, *self.new_ids]

    @property
    def kv_expires_at(self) -> float | None:
        """Until when KV of this turn may be kept: no longer than the session and each of its memories."""
        ends = (self.expires_at, None if self.memory is None else self.memory.expires_at)
        return min((end for end in ends if end is not None), default=None)


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

    def __init__(self, journal: Journal, codec: TextCodec, session_ttl: float | None = None) -> None:
        """`session_ttl` is in seconds: how long sessions last that turns begin; None is for ever."""
        self._journal = journal
        self._codec = codec
        self._session_ttl = session_ttl
        self._template = MemoryTemplate(codec)
        self.busy = Busy()

    def plan(self, asked: Asked) -> Plan:
        """Finds what the turn continues and encodes what is new. The session is held until `release(plan)`.

        Raises `ApiError`: 404 for what is not the tenant's, 409 for a busy session, 410 for a session one of whose
        memories ended, 400 for what cannot be rendered.
        """
        hold = Hold(self.busy, asked.tenant)
        try:
            return replace(self._plan(asked, hold), reads=hold.reads)
        except BaseException as error:
            hold.drop()
            if isinstance(error, NotFound):
                raise gone_error(error) from error
            if isinstance(error, Conflict):
                raise conflict(f"The session moved on meanwhile: {error}.", "session_conflict") from error
            if isinstance(error, ValueError):
                raise invalid(f"{str(error)[:1].upper()}{str(error)[1:]}.", "messages") from error
            raise

    def release(self, plan: Plan) -> None:
        """Lets the next turn of the session run. Must be called once for each plan, whatever became of it."""
        if plan.asked.store and plan.session_id is not None:
            self.busy.release(plan.asked.tenant, plan.session_id)
        for name in plan.reads:
            self.busy.done_reading(plan.asked.tenant, name)

    def commit(self, plan: Plan, replies: Sequence[Reply], version: str | None = None) -> list[Response]:
        """Journals the choices of a turn; the session goes on from the first, at `version` unless a refresh moved it
        meanwhile. On disk when this returns.

        Raises `ApiError` 409 when another turn was first, 404 when the session was deleted meanwhile.
        """
        tenant, session_id = plan.asked.tenant, plan.session_id
        if session_id is None:
            raise ValueError("a turn without a session cannot be kept")
        was = None if plan.origin is None else plan.origin.version
        move = None if version is None else VersionMove(was=was, now=version)
        try:
            if plan.create:
                memory_ids = plan.memory.memory_ids if plan.memory is not None else ()
                self._journal.create_session(
                    tenant, session_id, head=plan.parent, parent=plan.fork_of, memory_ids=memory_ids,
                    expires_at=plan.expires_at,
                )  # fmt: skip
            records = [self._record(plan, session_id, *entry) for entry in enumerate(replies)]
            return self._journal.add_responses(records, move)
        except Conflict as error:
            raise conflict(f"The session moved on while this turn ran: {error}.", "session_conflict") from error
        except Gone as error:
            raise gone_error(error, session_id) from error
        except NotFound as error:
            raise not_found(f"{error.kind.capitalize()} '{error.name}' was deleted meanwhile.", "session_id") from error

    def prefix(self, tenant: str, memory_ids: Sequence[str]) -> MemoryPrefix:
        """The ids with which sessions begin that attach these memories. Raises `NotFound` or `Gone`."""
        known = self._journal.get_prefix(tenant, memory_ids, self._codec.digest)
        if known is not None:
            return known
        texts = [memory.text for memory in self._journal.read_memories(tenant, memory_ids)]
        token_ids = self._template.prefix_ids(texts)
        return self._journal.put_prefix(tenant, memory_ids, self._codec.digest, token_ids)

    def memory_tokens(self, text: str) -> int:
        """How many tokens a memory of this text takes at the beginning of a prompt."""
        return len(self._template.prefix_ids([text]))

    def _plan(self, asked: Asked, hold: Hold) -> Plan:
        if asked.session_id is not None:
            return self._in_session(asked, asked.session_id, hold)
        if asked.previous_response_id is not None:
            parent = self._journal.get_response(asked.tenant, asked.previous_response_id)
            return self._after(asked, parent, asked.messages, "previous", hold)
        matched = self._match(asked, asked.memory_ids or ())
        if matched is not None:
            parent, new = matched
            return self._after(asked, parent, new, "resend", hold)
        return self._first(asked, "new", None, hold)

    def _in_session(self, asked: Asked, session_id: str, hold: Hold) -> Plan:
        if asked.store and not hold.take(session_id):
            raise conflict(f"A turn is already running in session '{session_id}'.", "session_busy")
        session = self._journal.get_session(asked.tenant, session_id)
        if session.head_response is None:
            return self._first(asked, "session", self._attached(asked, session), hold)
        head = self._journal.get_response(asked.tenant, session.head_response)
        matched = self._match(asked, session.memory_ids)
        if matched is not None and matched[0].session_id == session_id and matched[0].id != head.id:
            # The client went back to an earlier reply of this session: that is another conversation from there.
            return self._fork(asked, matched[0], matched[1], "session", hold, session)
        new = matched[1] if matched is not None and matched[0].id == head.id else asked.messages
        return self._continue(asked, head, new, "session", hold, session)

    def _attached(self, asked: Asked, session: Session) -> Session:
        """The session with the memories that its first turn asks for."""
        if not asked.memory_ids or session.memory_ids or not asked.store:
            return session if session.memory_ids else replace(session, memory_ids=asked.memory_ids or ())
        return self._journal.attach_memories(asked.tenant, session.id, asked.memory_ids)

    def _after(self, asked: Asked, parent: Response, new: list[Json], found: History, hold: Hold) -> Plan:
        """Continues from a reply: in its session when it is the latest there and no turn runs, else in a fork."""
        free = asked.store and hold.take(parent.session_id)
        session = self._journal.get_session(asked.tenant, parent.session_id)
        if free and session.head_response == parent.id:
            return self._continue(asked, parent, new, found, hold, session)
        return self._fork(asked, parent, new, found, hold, session)

    def _fork(
        self, asked: Asked, parent: Response, new: list[Json], found: History, hold: Hold, origin: Session
    ) -> Plan:
        hold.leave()
        plan = self._continue(asked, parent, new, found, hold, origin)
        session_id = new_session_id() if asked.store else None
        return replace(plan, session_id=session_id, create=asked.store, fork_of=origin.id if asked.store else None)

    def _first(self, asked: Asked, found: History, session: Session | None, hold: Hold) -> Plan:
        memory_ids = (asked.memory_ids or ()) if session is None else session.memory_ids
        memory = self._memory(asked, memory_ids, hold, session)
        expires_at = None if session is None else session.expires_at
        if session is None and self._session_ttl is not None:
            expires_at = self._journal.now() + self._session_ttl
        session_id = session.id if session is not None else new_session_id() if asked.store else None
        return Plan(
            asked=asked, found=found, session_id=session_id, create=session is None, fork_of=None, parent=None,
            origin=session, memory=memory, expires_at=expires_at, history=[], new=asked.messages, known_ids=[],
            new_ids=self._template.first_turn(len(memory_ids), asked.messages),
        )  # fmt: skip

    def _continue(
        self, asked: Asked, parent: Response, new: list[Json], found: History, hold: Hold, session: Session
    ) -> Plan:
        """The next turn of a session, from `parent`."""
        memory = self._memory(asked, session.memory_ids, hold, session)
        if asked.store:  # else the worker keeps nothing of it either
            hold.read("session", parent.session_id)
        chain = self._journal.chain(parent.id)
        history = conversation(chain)
        new = _without_repeated_system(history, new)
        if not new:
            raise ValueError("there is no new message to answer")
        rerender = parent.params.get("tokenizer") != self._codec.digest
        if rerender:
            known, delta = [], self._template.first_turn(len(session.memory_ids), [*history, *new])
        else:
            known = stored_ids(chain)
            delta = self._codec.next_turn(history, new, known[-1])
        return Plan(
            asked=asked, found=found, session_id=session.id if asked.store or asked.session_id else None, create=False,
            fork_of=None, parent=parent.id, origin=session, memory=memory, expires_at=session.expires_at,
            history=history, new=new, known_ids=known, new_ids=delta, rerendered=rerender,
        )  # fmt: skip

    def _memory(
        self, asked: Asked, memory_ids: Sequence[str], hold: Hold, session: Session | None
    ) -> MemoryPrefix | None:
        """The memories that the turn begins with, held for it. Raises `ApiError` when they are not those of the session
        or are not there any more."""
        if asked.memory_ids is not None and asked.memory_ids != tuple(memory_ids):
            raise invalid(
                f"Session '{session.id if session else None}' has other memories: 'memory_ids' are given when it is "
                "created or at its first turn.", "memory_ids", "invalid_value",
            )  # fmt: skip
        if not memory_ids:
            return None
        try:
            try:
                for memory_id in dict.fromkeys(memory_ids):
                    hold.read("memory", memory_id)
            except ApiError:
                self.prefix(asked.tenant, memory_ids)  # one whose time is over is told as such, also while it goes
                raise
            return self.prefix(asked.tenant, memory_ids)
        except Gone as error:
            raise gone_error(error, None if session is None else session.id) from error

    def _match(self, asked: Asked, memory_ids: Sequence[str]) -> tuple[Response, list[Json]] | None:
        """The stored reply that the longest beginning of the messages ends with, and the messages after it."""
        replies = [at for at, message in enumerate(asked.messages) if message["role"] == "assistant"]
        for at in reversed(replies[-_BOUNDARIES:]):
            if at + 1 == len(asked.messages):
                continue
            digest = self._codec.history_digest(asked.messages[: at + 1], asked.user, memory_ids)
            found = self._journal.find_by_history(asked.tenant, digest)
            if found is not None:
                return found, asked.messages[at + 1 :]
        return None

    def _record(self, plan: Plan, session_id: str, index: int, reply: Reply) -> NewResponse:
        answer = {"role": "assistant", "content": reply.text}
        memory_ids = () if plan.memory is None else plan.memory.memory_ids
        return NewResponse(
            id=reply.response_id,
            session_id=session_id,
            tenant=plan.asked.tenant,
            parent_response=plan.parent,
            input_messages=plan.new,
            output_message=answer,
            input_ids=plan.new_ids,
            output_ids=reply.output_ids,
            history_digest=self._codec.history_digest([*plan.history, *plan.new, answer], plan.asked.user, memory_ids),
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
