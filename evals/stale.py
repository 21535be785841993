"""What it would cost to serve the candidate on KV that the champion computed: the measure behind the policy `reuse`.

After a promotion a session's history is in KV memory under the old weights. Policy `refresh` computes it anew; policy
`reuse` would serve it as it is. Here the candidate reads the same tokens twice, once over its own KV and once over the
champion's, and the distributions of the next token are compared on the tokens that follow.

Probes are of two kinds, since what a version learned shows in other places than what it should not have touched:

- conversations: two held-out conversations as one session. The first, with its answer, is the history whose KV is old;
  the second, question and answer, follows. Besides, the candidate answers the second question itself, greedily, once
  over each history; how far the two answers agree is told beside the divergence.
- texts: the general texts of the perplexity guard. The first half is old; the second follows.

The figure that decides is the worse of the two. Beside it stands the noise: the divergence between two ways of
computing the same tokens under the same weights, which no stored KV can be below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from evals.results import StaleGroup, StaleKV
from evals.suites.base import Text

ANSWER_TOKENS = 8
"""Length of the greedy answers that are compared: short, since each token costs a step through the model."""


class SessionText(Text, Protocol):
    """Tokenizer and chat template that can also go on with a stored conversation."""

    def next_turn(
        self, history: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], last_id: int
    ) -> list[int]:
        """Ids to append to a conversation that ends with the reply whose ids end with `last_id`."""
        ...


@dataclass(frozen=True)
class Conversation:
    """A held-out conversation up to its question, and the answer people gave."""

    messages: Sequence[Mapping[str, Any]]
    answer: str


@dataclass(frozen=True)
class Probe:
    """Token ids of which the first `prefix` are read from stored KV and the rest is computed.

    Those from `answer_start` on are an answer; None where nobody answers.
    """

    token_ids: list[int]
    prefix: int
    answer_start: int | None = None


@dataclass(frozen=True)
class Probes:
    """What is asked, by kind; a kind may be empty."""

    conversations: tuple[Probe, ...]
    texts: tuple[Probe, ...]

    def __bool__(self) -> bool:
        return bool(self.conversations or self.texts)


class DivergenceClient(Protocol):
    """The part of `serve.backends.client.CompletionsClient` that measuring needs."""

    async def divergence(
        self,
        model: str,
        prompts: Sequence[Sequence[int]],
        prefixes: Sequence[int],
        versions: Sequence[str],
        *,
        answer_tokens: int,
    ) -> Mapping[str, Any]:
        """The worker's `POST /v1/kv/divergence`."""
        ...


def build_probes(
    text: SessionText, conversations: Sequence[Conversation], texts: Sequence[Sequence[int]], most: int, room: int
) -> Probes:
    """At most `most` probes of each kind, none longer than `room` tokens."""
    paired = [
        _session(text, conversations[index - 1], conversation)
        for index, conversation in enumerate(conversations[:most])
    ]
    halves = [Probe(list(ids), len(ids) // 2) for ids in texts[:most] if len(ids) >= 4]
    return Probes(
        tuple(probe for probe in paired if len(probe.token_ids) <= room),
        tuple(probe for probe in halves if len(probe.token_ids) <= room),
    )


def _session(text: SessionText, first: Conversation, then: Conversation) -> Probe:
    """`first` with its answer is the history; `then` follows it in the same session."""
    history = text.first_turn(first.messages) + text.encode_plain(first.answer)
    said = [*first.messages, {"role": "assistant", "content": first.answer}]
    new = [message for message in then.messages if message["role"] not in ("system", "developer")]
    question = text.next_turn(said, new, history[-1])
    token_ids = history + question + text.encode_plain(then.answer)
    return Probe(token_ids, len(history), len(history) + len(question))


async def measure(
    client: DivergenceClient, probes: Probes, *, candidate: str, champion: str, names: tuple[str, str], threshold: float
) -> StaleKV:
    """Asks a worker that has both versions resident, as `candidate` and `champion`; `names` are theirs in the report.

    There must be something to ask. `NotSupported` passes through for a worker of another kind.
    """

    async def ask(prompts: list[list[int]], chosen: Sequence[Probe], answer_tokens: int) -> Mapping[str, Any]:
        prefixes = [probe.prefix for probe in chosen]
        return await client.divergence(candidate, prompts, prefixes, [champion], answer_tokens=answer_tokens)

    groups = []
    for kind, chosen in (("conversations", probes.conversations), ("texts", probes.texts)):
        if not chosen:
            continue
        compared = await ask([probe.token_ids for probe in chosen], chosen, 0)
        questions = [probe.token_ids[: probe.answer_start] for probe in chosen if probe.answer_start is not None]
        answered = await ask(questions, chosen, ANSWER_TOKENS) if questions else None
        agreement = answered["versions"][champion]["answer_agreement"] if answered else None
        groups.append(_group(kind, len(chosen), compared["versions"][champion], compared["noise"], agreement))
    worst = max(group.kl for group in groups)
    return StaleKV(
        candidate=names[0],
        under=names[1],
        groups=groups,
        kl=worst,
        threshold=threshold,
        allowed=worst < threshold,
    )


def _group(
    kind: str, probes: int, stale: Mapping[str, Any], noise: Mapping[str, Any], agreement: float | None
) -> StaleGroup:
    return StaleGroup(
        kind=kind,
        probes=probes,
        tokens=int(stale["tokens"]),
        kl=float(stale["kl_mean"]),
        kl_p95=float(stale["kl_p95"]),
        top1=float(stale["top1"]),
        answer_agreement=agreement,
        noise_kl=float(noise["kl_mean"]),
    )
