"""Against float64, at every border: tiles, vectors, pairs, the causal edge, equal and huge scores, strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.kernels.few_queries import MOST_ROWS, few_queries

ABLE = few_queries(*(torch.zeros(1, 1, 64, dtype=torch.bfloat16) for _ in range(4)))
needs_kernel = pytest.mark.skipif(not ABLE, reason="this machine has no AVX512-BF16, or no C++ compiler")


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    tokens, heads, dim = query.shape
    keys, group = key.shape[1], heads // len(key)
    hidden = torch.arange(keys)[None] > torch.arange(keys - tokens, keys)[:, None]
    out = torch.empty(query.shape, dtype=torch.float64)
    for head in range(heads):
        scores = query[:, head].double() @ key[head // group].double().T * dim**-0.5
        out[:, head] = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value[head // group].double()
    return out


def case(
    tokens: int, group: int, kv_heads: int, keys: int, dim: int, seed: int, spread: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(tokens, group * kv_heads, dim, generator=random) * spread
    kv = torch.randn(2, kv_heads, keys + 7, dim, generator=random).bfloat16()[:, :, :keys]
    return query.bfloat16(), kv[0], kv[1]


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    out = torch.full(query.shape, float("nan"), dtype=torch.bfloat16)
    assert few_queries(query, key, value, out)
    # Weights are rounded to bfloat16 before they meet the values, and so is the result.
    torch.testing.assert_close(out.double(), reference(query, key, value), rtol=2**-7, atol=2**-7)


@needs_kernel
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_it_is_attention(data: st.DataObject) -> None:
    group = data.draw(st.integers(1, 8))
    tokens = data.draw(st.integers(1, min(40, MOST_ROWS // group)))
    keys = tokens + data.draw(st.sampled_from([0, 1, 2, 31, 126, 127, 128, 129, 255, 256, 300, 1000]))
    dim = data.draw(st.sampled_from([64, 128]))
    check(*case(tokens, group, data.draw(st.integers(1, 3)), keys, dim, seed=data.draw(st.integers(0, 99))))


@needs_kernel
@pytest.mark.parametrize("spread", [0.0, 30.0], ids=["equal scores", "one score far above the others"])
def test_scores_of_any_spread(spread: float) -> None:
    check(*case(13, 3, 3, 777, 64, seed=5, spread=spread))


@needs_kernel
def test_later_keys_are_not_seen() -> None:
    query, key, value = case(5, 3, 2, 200, 64, seed=1)
    out, changed = torch.empty_like(query), torch.empty_like(query)
    assert few_queries(query, key, value, out)
    key[:, -1], value[:, -1] = 50.0, 50.0
    assert few_queries(query, key, value, changed)
    assert torch.equal(out[:-1], changed[:-1])
    assert not torch.equal(out[-1], changed[-1])


@needs_kernel
def test_queries_within_a_wider_array() -> None:
    query, key, value = case(6, 3, 3, 150, 64, seed=2)
    wide = torch.zeros(6, 15, 64, dtype=torch.bfloat16)
    wide[:, :9] = query
    check(wide[:, :9], key, value)
    assert not wide[:, 9:].any()


@pytest.mark.parametrize(
    ("tokens", "dim", "dtype"),
    [(MOST_ROWS + 1, 64, torch.bfloat16), (4, 32, torch.bfloat16), (4, 64, torch.float32)],
)
def test_what_it_is_not_for_is_left_alone(tokens: int, dim: int, dtype: torch.dtype) -> None:
    query = torch.ones(tokens, 1, dim, dtype=dtype)
    out = torch.full_like(query, 7.0)
    assert not few_queries(query, query.transpose(0, 1), query.transpose(0, 1), out)
    assert (out == 7.0).all()
