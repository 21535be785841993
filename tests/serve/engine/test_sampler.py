"""Drawing tokens: greedy, temperature, nucleus, seeds, bans, log-probabilities."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from serve.engine.errors import InvalidRequest
from serve.engine.request import Sampling
from serve.engine.sampler import new_generator, sample, token_logprobs

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0])


def draw(count: int, sampling: Sampling, logits: torch.Tensor = LOGITS) -> Counter[int]:
    generator = new_generator(7, 0)
    return Counter(sample(logits, sampling, generator, ()) for _ in range(count))


def test_greedy_takes_the_likeliest_that_is_not_banned() -> None:
    greedy = Sampling(temperature=0)
    assert sample(LOGITS, greedy, new_generator(0, 0), ()) == 4
    assert sample(LOGITS, greedy, new_generator(0, 0), (4, 0)) == 1
    assert LOGITS[4] == 3.0, "the caller's logits are left alone"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, -1)
    counts = draw(4000, Sampling(temperature=temperature))
    for token in range(5):
        assert counts[token] / 4000 == pytest.approx(float(expected[token]), abs=0.03)


def test_nucleus_keeps_the_fewest_tokens_that_reach_top_p() -> None:
    assert set(draw(300, Sampling(top_p=0.6))) == {4}
    assert set(draw(500, Sampling(top_p=0.85))) == {4, 0}
    flat = torch.zeros(2000)
    assert len(draw(3000, Sampling(top_p=0.9), flat)) > 256, "a nucleus may be larger than the first look"


def test_seeds_reproduce_and_choices_differ() -> None:
    flat = torch.zeros(1000)
    replies = {
        (seed, choice): [sample(flat, Sampling(), generator, ()) for _ in range(8)]
        for seed in (1, 2)
        for choice in (0, 1, 2)
        for generator in [new_generator(seed, choice)]
    }
    again = new_generator(1, 0)
    assert replies[1, 0] == [sample(flat, Sampling(), again, ()) for _ in range(8)]
    assert replies[1, 0] != replies[1, 2]
    one, other = new_generator(None, 0), new_generator(None, 0)
    assert [sample(flat, Sampling(), one, ()) for _ in range(8)] != [
        sample(flat, Sampling(), other, ()) for _ in range(8)
    ]


def test_logprobs_are_the_models_own() -> None:
    rows = torch.stack((LOGITS, LOGITS.flip(0)))
    expected = torch.log_softmax(rows, -1)
    first, second = token_logprobs(rows, [1, 0], top=2)
    assert first.logprob == pytest.approx(float(expected[0, 1]))
    assert (first.rank, second.rank) == (3, 1)
    assert [token for token, _ in first.top] == [4, 0]
    assert first.top[0][1] == pytest.approx(float(expected[0, 4]))
    assert token_logprobs(rows, [1, 0], top=0)[0].top == ()
    assert first.with_top(1).top == first.top[:1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("n", 0),
        ("max_tokens", -1),
        ("min_tokens", 5),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
    ],
)
def test_values_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=field):
        Sampling(**{"max_tokens": 4, field: value}).check()
