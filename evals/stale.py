"""What it would cost to serve the candidate on KV that the champion computed: the measure behind the policy `reuse`.

After a promotion a session's history is in KV memory under the old weights. Policy `refresh` computes it anew; policy
`reuse` would serve it as it is. Here the candidate reads the same tokens twice, once over its own KV and once over the
champion's, and the distributions of the next token are compared on the tokens that follow.

Probes are of two kinds, since what a version learned shows in other places than what it should not have touched:

- conversations: two held-out conversations as one session. The first, with its answer, is the history whose KV is old;
  the second, question and answer, follows.
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
    """Token ids of which the first `prefix` are read from stored KV and the rest is computed."""

    token_ids: list[int]
    prefix: int


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
        self, model: str, prompts: Sequence[Sequence[int]], prefixes: Sequence[int], versions: Sequence[str]
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
    follows = text.next_turn(said, new, history[-1]) + text.encode_plain(then.answer)
    return Probe(history + follows, len(history))


async def measure(
    client: DivergenceClient, probes: Probes, *, candidate: str, champion: str, names: tuple[str, str], threshold: float
) -> StaleKV:
    """Asks a worker that has both versions resident, as `candidate` and `champion`; `names` are theirs in the report.

    There must be something to ask. `NotSupported` passes through for a worker of another kind.
    """
    groups: dict[str, StaleGroup] = {}
    for kind, chosen in (("conversations", probes.conversations), ("texts", probes.texts)):
        if chosen:
            answer = await client.divergence(
                candidate, [probe.token_ids for probe in chosen], [probe.prefix for probe in chosen], [champion]
            )
            groups[kind] = _group(kind, len(chosen), answer, champion)
    worst = max(group.kl for group in groups.values())
    return StaleKV(
        candidate=names[0],
        under=names[1],
        groups=list(groups.values()),
        kl=worst,
        threshold=threshold,
        allowed=worst < threshold,
    )


def _group(kind: str, probes: int, answer: Mapping[str, Any], champion: str) -> StaleGroup:
    stale, noise = answer["versions"][champion], answer["noise"]
    return StaleGroup(
        kind=kind,
        probes=probes,
        tokens=int(stale["tokens"]),
        kl=float(stale["kl_mean"]),
        kl_p95=float(stale["kl_p95"]),
        top1=float(stale["top1"]),
        answer_agreement=None if stale.get("answer_agreement") is None else float(stale["answer_agreement"]),
        noise_kl=float(noise["kl_mean"]),
    )
