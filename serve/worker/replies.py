"""Engine events as the JSON of vLLM's completions endpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from serve.engine.request import Choice, Completion, TokenEvent, TokenLogprob, Usage
from serve.engine.sequence import worst

Json = dict[str, Any]


class CountedUsage:
    """The usage of a stream so far. The whole account once for each prompt; between, only counts, which cost little."""

    def __init__(self) -> None:
        self._begun: list[Usage] = []
        self._generated = 0

    def add(self, event: TokenEvent) -> Json:
        """Counts a token in and returns the usage with it. Prompts that wait for their first token are not in it."""
        self._generated += 1
        if event.usage is not None:
            self._begun.append(event.usage)
        usage = usage_json(self._begun) if event.usage is not None else _counts(self._begun)
        usage["completion_tokens"] = self._generated
        usage["total_tokens"] = usage["prompt_tokens"] + self._generated
        return usage


class ReplyWriter:
    """Writes the replies to one HTTP request for prompts that have `n` choices each."""

    def __init__(self, completion_id: str, created: int, model: str, n: int) -> None:
        self._head = {"id": completion_id, "object": "text_completion", "created": created, "model": model}
        self._n = n

    def chunk(self, event: TokenEvent) -> Json:
        """One token as a chunk of a stream."""
        logprobs = None if event.logprob is None else _logprobs([event.logprob])
        choice = {
            "index": event.request * self._n + event.choice,
            "text": "",
            "token_ids": [event.token_id],
            "logprobs": logprobs,
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
        }
        return {**self._head, "choices": [choice]}

    def counted_chunk(self, event: TokenEvent, counted: CountedUsage) -> Json:
        """The same with the usage so far; `counted` is told of the token."""
        return {**self.chunk(event), "usage": counted.add(event)}

    def usage_chunk(self, usages: Sequence[Usage]) -> Json:
        """The last chunk of a stream."""
        return {**self._head, "choices": [], "usage": usage_json(usages)}

    def whole(self, completions: Sequence[Completion]) -> Json:
        """The answer to a request that does not stream."""
        choices = [
            self._choice(place * self._n + at, choice, completion)
            for place, completion in enumerate(completions)
            for at, choice in enumerate(completion.choices)
        ]
        return {**self._head, "choices": choices, "usage": usage_json([each.usage for each in completions])}

    def _choice(self, index: int, choice: Choice, completion: Completion) -> Json:
        return {
            "index": index,
            "text": "",
            "token_ids": list(choice.token_ids),
            "logprobs": _logprobs(choice.logprobs) if choice.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt_logprobs": _prompt_logprobs(completion.prompt_logprobs),
        }


def usage_json(usages: Sequence[Usage]) -> Json:
    """The usage of all prompts together; spans and time to first token are those of the first prompt."""
    first = usages[0]
    return {
        **_counts(usages),
        "kvloop": {
            "restored_tokens": _sum(u.disk_tokens for u in usages),
            "ram_tokens": _sum(u.ram_tokens for u in usages),
            "remote_tokens": _sum(u.remote_tokens for u in usages),
            "lifted_tokens": _sum(u.lifted_tokens for u in usages),
            "computed_tokens": _sum(u.computed_tokens for u in usages),
            "generated_tokens": _sum(u.generated_tokens for u in usages),
            "fidelity": worst(*(u.fidelity for u in usages)),
            "weights_id": first.weights_id,
            "ttft_ms": first.ttft_ms,
            "spans": [asdict(span) for span in first.spans],
        },
    }


def _counts(usages: Sequence[Usage]) -> Json:
    prompt, generated = _sum(u.prompt_tokens for u in usages), _sum(u.generated_tokens for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": _sum(u.cached_tokens for u in usages)},
    }


def _sum(counts: Iterable[int]) -> int:
    return sum(counts)


def _token(token_id: int) -> str:
    return f"token_id:{token_id}"


def _logprobs(logprobs: Sequence[TokenLogprob]) -> Json:
    return {
        "tokens": [_token(each.token_id) for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [
            {_token(each.token_id): each.logprob} | {_token(token): value for token, value in each.top}
            for each in logprobs
        ],
        "text_offset": [],
    }


def _prompt_logprobs(scores: Sequence[TokenLogprob] | None) -> list[Json | None] | None:
    """One entry a prompt token, null for the first: nothing comes before it."""
    if scores is None:
        return None
    entries: list[Json | None] = [None]
    for score in scores:
        entry = {str(score.token_id): _entry(score.logprob, score.rank)}
        for rank, (token, value) in enumerate(score.top, start=1):
            entry.setdefault(str(token), _entry(value, rank))
        entries.append(entry)
    return entries


def _entry(logprob: float, rank: int) -> Json:
    return {"logprob": logprob, "rank": rank, "decoded_token": None}
