"""The request bodies of the worker, as vLLM's server takes them. An unknown field is an error that names it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from memory.kv.fidelity import Fidelity
from serve.engine.request import MAX_OWNER_LENGTH, KVOptions, Request, Sampling

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Owner = Annotated[str, StringConstraints(min_length=1, max_length=MAX_OWNER_LENGTH)]
MAX_OWNERS = 1 << 16
MAX_ANSWER_TOKENS = 256


class Body(BaseModel):
    """Immutable, and without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class StreamOptions(Body):
    """What a stream carries besides tokens."""

    include_usage: bool = False
    """Ends the stream with a chunk that has no choices but the usage."""
    continuous_usage_stats: bool = False
    """Puts the usage so far on every chunk; the account in `kvloop` only where a prompt's first token is."""


class KVTransfer(Body):
    """What KV memory may do for a request."""

    kv_save: bool = True
    """Whether the sequence is remembered, as far as it is computed."""
    kv_owner: str = Field(default="", max_length=MAX_OWNER_LENGTH)
    """On whose behalf: `POST /v1/kv/forget` takes owners. Empty is the tenant itself, whom nobody deletes."""
    kv_expires_at: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds since the epoch after which what this request stores is never used again."""
    kv_least_fidelity: Fidelity = "compact"
    """What is stored less exactly than this is computed anew."""
    kv_reuse_model: Name | None = None
    """A version whose stored KV may be used where the model's own is missing; spans then name its weights, as stale.
    What is computed over it is not remembered. A version that is not resident is left out."""

    def options(self) -> KVOptions:
        """The same as the engine has it."""
        return KVOptions(
            save=self.kv_save,
            owner=self.kv_owner,
            expires_at=self.kv_expires_at,
            least_fidelity=self.kv_least_fidelity,
            reuse_model=self.kv_reuse_model,
        )


class CompletionBody(Body):
    """`POST /v1/completions`. Prompts are token ids; replies have empty texts, for a worker knows no tokenizer."""

    model: Name
    """Name of a resident version."""
    prompt: list[int] | list[list[int]]
    """One prompt, or several that are computed together."""
    max_tokens: int | None = None
    """Most tokens of a reply; as many as fit the context when null. 0 computes and remembers the prompt, no more."""
    temperature: float | None = None
    """0 is greedy; 1 when null."""
    top_p: float | None = None
    """Share of probability that is drawn from; all of it when null."""
    n: int = 1
    """Replies for each prompt."""
    seed: int | None = None
    """Makes the reply reproducible; choice i of n draws with seed + i."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Ids that end a reply, besides the model's own; the id is part of the reply."""
    ignore_eos: bool = False
    """Generates on past the model's own end ids."""
    min_tokens: int = 0
    """No end id is drawn before a reply has this many tokens."""
    logprobs: int | None = None
    """Reports the log-probability of each token of the reply, and of this many likeliest ones."""
    prompt_logprobs: int | None = None
    """The same for the prompt. Such a request computes its whole prompt and leaves KV memory alone."""
    stream: bool = False
    """Sends tokens as they are drawn, as server-sent events."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    return_token_ids: bool = True
    """Accepted for vLLM's sake: token ids are always returned."""
    return_tokens_as_token_ids: bool = True
    """Accepted for vLLM's sake: log-probabilities always name tokens as `token_id:<id>`."""
    cache_salt: str = ""
    """Secret of the tenant: KV is shared only between requests that have the same."""
    kv_transfer_params: KVTransfer = KVTransfer()
    """What KV memory may do."""
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    """Above 0, the request runs while there is nothing else to do, and gives way to others at any time."""

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        """Every prompt of the request."""
        if self.prompt and isinstance(self.prompt[0], list):
            return [tuple(ids) for ids in self.prompt if isinstance(ids, list)]
        return [tuple(token for token in self.prompt if isinstance(token, int))]

    def requests(self) -> list[Request]:
        """What the engine is to do."""
        sampling = Sampling(
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            n=self.n,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
        kv = self.kv_transfer_params.options()
        return [Request(self.model, prompt, sampling, self.cache_salt, kv, self.priority) for prompt in self.prompts]


class ForgetBody(Body):
    """`POST /v1/kv/forget`."""

    owners: list[Owner] = Field(max_length=MAX_OWNERS)
    """On whose behalf what was stored is to go, whatever version computed it: first its keys, then its bytes."""
    cache_salt: str = ""
    """Secret of the tenant whose owners these are. Their requests that run now will not store anything more."""


class DivergenceBody(Body):
    """`POST /v1/kv/divergence`."""

    model: Name
    """Name of a resident version, whose next-token distributions are compared."""
    prompts: list[list[int]] = Field(min_length=1)
    """Token sequences."""
    prefixes: list[int] = Field(min_length=1)
    """For each prompt, how many of its first tokens have their KV replaced; the tokens after those are compared."""
    codecs: list[Fidelity] = Field(default_factory=list)
    """Rungs whose codec the KV goes through."""
    versions: list[Name] = Field(default_factory=list)
    """Resident versions whose KV is used instead."""
    answer_tokens: int = Field(default=0, ge=0, le=MAX_ANSWER_TOKENS)
    """Length of the greedy answers after each prompt that are compared; less where the context ends before."""


class MeasureBody(Body):
    """`POST /v1/kv/measure`."""


class LoadAdapterBody(Body):
    """`POST /v1/load_lora_adapter`."""

    lora_name: Name
    """Name that requests will use; never one that was used for other weights."""
    lora_path: Path
    """Folder of the PEFT adapter, on this machine."""


class UnloadAdapterBody(Body):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Name
    """Name of a resident adapter."""
