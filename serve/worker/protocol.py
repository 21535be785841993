"""The request bodies of the worker, as vLLM's server takes them. An unknown field is an error that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from serve.engine.request import Request, Sampling

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]


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
    """Whether the sequence is remembered when it ends."""


class CompletionBody(Body):
    """`POST /v1/completions`. Prompts are token ids; replies have empty texts, for a worker knows no tokenizer."""

    model: Name
    """Name of a resident version."""
    prompt: list[int] | list[list[int]]
    """One prompt, or several that are computed together."""
    max_tokens: int | None = None
    """Most tokens of a reply; as many as fit the context when null."""
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

    @property
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
        save = self.kv_transfer_params.kv_save
        return [Request(self.model, prompt, sampling, self.cache_salt, save) for prompt in self.prompts]


class ForgetBody(Body):
    """`POST /v1/kv/forget`."""

    prompts: list[list[int]]
    """Token sequences whose KV is to be forgotten, by whatever version it was computed."""
    keep_tokens: list[int] | None = None
    """For each prompt, how many of its first tokens may stay, because others still need them; none when null."""
    cache_salt: str = ""
    """Secret of the tenant: its requests that run now will not save these sequences when they end."""


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
