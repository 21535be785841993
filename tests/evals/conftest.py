"""A scripted worker for the tests of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.evals.fake_worker import State, serving


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def url(state: State) -> Iterator[str]:
    with serving(state) as url:
        yield url
