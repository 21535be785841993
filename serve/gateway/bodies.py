"""Request bodies: what is accepted, in full. A field that is not known is an error that names the nearest known one.

Fields OpenAI knows and this server does not carry out are accepted only at the value that asks for nothing.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from starlette.requests import Request

from serve.gateway.errors import ApiError, invalid, unsupported

Json = dict[str, Any]


def _small(value: dict[str, str]) -> dict[str, str]:
    if len(value) > 16 or any(len(key) > 64 or len(text) > 512 for key, text in value.items()):
        raise ValueError("at most 16 entries, keys up to 64 and values up to 512 characters")
    return value


Metadata = Annotated[dict[str, str], AfterValidator(_small)]


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _each_once(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(value) > _MOST_MEMORIES or len(set(value)) != len(value):
        raise ValueError(f"at most {_MOST_MEMORIES} memories, each once")
    return value


_MOST_MEMORIES = 16
MemoryIds = Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_each_once)]
# A hundred years: times beyond it are mistakes, such as milliseconds.
Ttl = Annotated[float, Field(gt=0, le=3_155_760_000)]

_NOTHING_ASKED: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "max_tool_calls": (None,),
    "response_format": (None, {"type": "text"}),
    "text": (None, {}, {"format": {"type": "text"}}, {"format": None}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None, "none"),
    "reasoning": (None, {}),
    "verbosity": (None, "medium"),
    "service_tier": (None, "auto", "default"),
    "background": (None, False),
    "truncation": (None, "disabled"),
    "conversation": (None,),
    "prompt": (None,),
    "context_management": (None, []),
}
# Hints for a cache or an abuse team elsewhere; they change nothing here.
_IGNORED = frozenset({"prompt_cache_key", "prompt_cache_retention", "safety_identifier"})
# Fields OpenAI's messages have, beside what a `ChatMessage` takes.
_NOT_IN_MESSAGES = frozenset({"tool_calls", "tool_call_id", "function_call", "audio", "refusal"})


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Part(_Body):
    """A piece of content. Only text is understood."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ChatMessage(_Body):
    """One message as a client sends it, also in the shape the API gave it out (null fields are dropped)."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    annotations: list[Any] | None = None

    def plain(self) -> Json:
        """Role and text: what the template sees and the journal keeps."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class Sampling(_Body):
    """What both APIs share."""

    model: str = Field(min_length=1, max_length=256)
    stream: bool = False
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    store: bool = True
    metadata: Metadata = Field(default_factory=dict)
    user: str | None = Field(default=None, max_length=512)
    session_id: str | None = Field(default=None, min_length=1, max_length=128)
    memory_ids: MemoryIds | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        # The official client sends null for what was not set.
        return {name: value for name, value in values.items() if value is not None}

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            return tuple(value)
        raise ValueError("must be a string or a list of strings")

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not entry for entry in value):
            raise ValueError("must not contain an empty string")
        return value


class StreamOptions(_Body):
    """`include_obfuscation` asks for padding against eavesdroppers; there is none here."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class ChatBody(Sampling):
    """`POST /v1/chat/completions`."""

    messages: tuple[ChatMessage, ...] = Field(min_length=1)
    n: int = Field(default=1, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _messages(cls, value: Any) -> Any:
        return tuple(map(_without_nulls, value)) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


class ResponsesBody(Sampling):
    """`POST /v1/responses`; `seed`, `stop` and `session_id` are ours."""

    input: str | tuple[ChatMessage, ...]
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, min_length=1, max_length=128)
    max_output_tokens: int | None = Field(default=None, ge=1)
    include: tuple[Literal["message.output_text.logprobs", "reasoning.encrypted_content"], ...] = ()
    stream_options: StreamOptions | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _items(cls, value: Any) -> Any:
        return tuple(map(_without_nulls, value)) if isinstance(value, list) else value

    @field_validator("include", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return _listed(value)

    @model_validator(mode="after")
    def _one_source(self) -> ResponsesBody:
        if self.session_id is not None and self.previous_response_id is not None:
            raise ValueError("give session_id or previous_response_id, not both")
        if not self.input:
            raise ValueError("input must not be empty")
        return self


class SessionBody(_Body):
    """`POST /v1/sessions`. The session and everything said in it is deleted `ttl_seconds` after its creation."""

    metadata: Metadata = Field(default_factory=dict)
    memory_ids: MemoryIds = ()
    ttl_seconds: Ttl | None = None


class MemoryBody(_Body):
    """`POST /v1/memories` as JSON; the same fields come as a form with `file` in place of `text`."""

    text: str
    name: str | None = Field(default=None, min_length=1, max_length=128)
    ttl_seconds: Ttl | None = None


class ForkBody(_Body):
    """`POST /v1/sessions/{id}/fork`: from the session's latest reply, or from an earlier one."""

    response_id: str | None = None
    metadata: Metadata = Field(default_factory=dict)


class FeedbackBody(_Body):
    """`POST /v1/feedback`. A demonstration's value is the corrected answer, as text or as an assistant message."""

    kind: Literal["boolean", "float", "comment", "demonstration"]
    value: bool | float | int | str | Json
    response_id: str | None = None
    session_id: str | None = None
    source: str = Field(default="", max_length=256)


class ActivateBody(_Body):
    """`POST /internal/versions/activate`. `path` null with name "base" returns to the base model."""

    name: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]*$")
    path: str | None = None
    version: str | int | None = None
    weights_id: str | None = None
    fingerprint: Json | None = None
    who: str = ""
    reason: str = ""
    report: str | None = None
    action: Literal["promote", "rollback", "follow"] | None = None
    stale_kl: float | None = Field(default=None, ge=0)


B = TypeVar("B", bound=BaseModel)


async def read_body(request: Request, kind: type[B], *, empty_ok: bool = False) -> B:
    """The request's body as `kind`. Raises `ApiError` 400 that says which field is wrong and why."""
    raw = await request.body()
    try:
        given = json.loads(raw, parse_constant=_refuse_constant) if raw or not empty_ok else {}
        if b"\\ud" in raw.lower():
            # Half a surrogate pair is valid JSON and no text: it could not be encoded or kept.
            json.dumps(given, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise invalid(f"The body is not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise invalid(f"The body must be a JSON object, not {type(given).__name__}.")
    return parse(kind, given)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def parse(kind: type[B], given: Json) -> B:
    """`given` as `kind`; see `read_body`."""
    if issubclass(kind, Sampling):
        given = _only_what_is_done(kind, given)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _explain(kind, error) from error


def _only_what_is_done(kind: type[BaseModel], given: Json) -> Json:
    kept: Json = {}
    for name, value in given.items():
        if name in kind.model_fields:
            kept[name] = value
        elif name in _NOTHING_ASKED:
            if value not in _NOTHING_ASKED[name]:
                raise unsupported(name, f"'{name}' is not supported by this server: leave it out.")
        elif name not in _IGNORED:
            raise _unknown(name, kind)
    return kept


def _unknown(name: str, kind: type[BaseModel], where: str = "") -> ApiError:
    known = [*kind.model_fields, *(_NOTHING_ASKED if issubclass(kind, Sampling) else ())]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return invalid(f"Unknown parameter: '{where}{name}'.{hint}", param=f"{where}{name}", code="unknown_parameter")


def _explain(kind: type[BaseModel], error: ValidationError) -> ApiError:
    # Of a union's branches, the one that got furthest into the body says most.
    first = max(error.errors(include_url=False), key=lambda entry: len(entry["loc"]))
    steps = [step for step in first["loc"] if not _is_branch(step)]
    path = ".".join(map(str, steps))
    if first["type"] == "extra_forbidden":
        owner = {"messages": ChatMessage, "input": ChatMessage}.get(str(steps[0]), kind) if len(steps) > 1 else kind
        if "content" in steps[:-1]:
            owner = Part
        if owner is ChatMessage and steps[-1] in _NOT_IN_MESSAGES:
            return unsupported(path, f"'{path}' is not supported by this server: leave it out.")
        where = "".join(f"{step}." for step in steps[:-1])
        return _unknown(str(steps[-1]), owner, where)
    if first["type"] == "missing":
        return invalid(f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return invalid(f"Invalid '{path}': {message}." if path else f"{message}.", param=path or None, code="invalid_value")


def _is_branch(step: str | int) -> bool:
    """pydantic names the branch of a union as a step of the path; those names are no field of ours."""
    return isinstance(step, str) and (step in {"str", "bool", "int", "float"} or "[" in step)


def _without_nulls(value: Any) -> Any:
    # What an API gave out as null or as an empty list (refusal, tool_calls, ...) may come back with the history.
    if not isinstance(value, dict):
        return value
    return {name: entry for name, entry in value.items() if entry is not None and (name, entry) != ("tool_calls", [])}
