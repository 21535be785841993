"""A pack computes what its rows would compute one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train import attention
from train.decoder import Decoder, UnsupportedModel
from train.packing import Row, pack_rows

START = [1, 20, 21, 22, 23, 24]


def row(ids: list[int], completion_start: int) -> Row:
    return Row(np.array(ids, dtype=np.int64), completion_start)


ROWS = [
    row([*START, 30, 31, 32, 33, 2], 8),
    row([*START, 40, 41, 2], 7),
    row([50, 51, 52, 53], 1),  # raw text: shares nothing, even when it began alike
    row([*START[:4], 60, 61, 62, 63, 64, 65], 6),
]


def alone(model: Any, one: Row) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(one.token_ids)[None]).logits[0]
    return logits[one.first_target_position : -1]


@pytest.mark.parametrize("layers_from", [0, 2])
def test_pack_equals_rows_alone(load_tiny: Callable[[], Any], layers_from: int) -> None:
    model = load_tiny().float()
    decoder = Decoder(model, layers_from)
    for order in (ROWS, ROWS[::-1], ROWS[1:2], ROWS[:2]):
        (pack,) = pack_rows(order, 1000)
        with torch.no_grad():
            states = decoder.hidden(pack)
        for index, one in enumerate(pack.rows):
            found = decoder.logits(states[pack.target_positions(index)])
            torch.testing.assert_close(found, alone(model, one), atol=1e-5, rtol=1e-4)


def test_long_packs_are_streamed(load_tiny: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MATERIALISED", 0)
    test_pack_equals_rows_alone(load_tiny, 0)


def test_common_start_is_laid_out_once() -> None:
    (pack,) = pack_rows(ROWS, 1000)
    assert pack.shared == 4
    assert pack.sharing == (True, True, False, True)
    assert len(pack.token_ids) == sum(len(one.token_ids) for one in ROWS) - 2 * 4


def test_frozen_layers_get_no_gradient(load_tiny: Callable[[], Any]) -> None:
    model = load_tiny().float()
    (pack,) = pack_rows(ROWS, 1000)
    Decoder(model, 1).hidden(pack).sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is None
    assert model.model.layers[1].mlp.up_proj.weight.grad is not None


def test_other_architectures_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Linear is not a Llama-family decoder"):
        Decoder(torch.nn.Linear(1, 1), 0)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 3), min_size=2, max_size=12), st.integers(0, 11)), min_size=1, max_size=6
    ),
    st.integers(4, 40),
)
def test_every_row_is_whole_in_its_pack(specs: list[tuple[list[int], int]], budget: int) -> None:
    rows = [row(ids, min(start, len(ids) - 1)) for ids, start in specs]
    packs = pack_rows(rows, budget)
    assert [id(one) for pack in packs for one in pack.rows] == [id(one) for one in rows]
    for pack in packs:
        for index, one in enumerate(pack.rows):
            last = int(pack.layout.places[pack.spans[index][1] - 1])
            segment, place = divmod(last, pack.layout.queries.shape[1])
            seen = pack.layout.keys[segment][pack.layout.visible[segment, place]]
            assert pack.token_ids[seen].tolist() == one.token_ids.tolist()
            assert pack.positions[seen].tolist() == list(range(len(one.token_ids)))
            targets = pack.token_ids[pack.target_positions(index) + 1].tolist()
            assert targets == one.token_ids[one.first_target_position + 1 :].tolist()
