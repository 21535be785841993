"""A fresh journal for each test, and a short way to add turns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memory.journal import Journal, NewResponse


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/journal.db"


@pytest.fixture
def journal(url: str) -> Iterator[Journal]:
    with Journal.open(url) as opened:
        yield opened


def turn(session_id: str, parent: str | None, words: str = "hello", tenant: str = "acme", **extra: Any) -> NewResponse:
    values: dict[str, Any] = {
        "input_messages": [{"role": "user", "content": words}],
        "output_message": {"role": "assistant", "content": f"re: {words}"},
        "input_ids": [1, 2, 3],
        "output_ids": [4, 5],
        "history_digest": b"\x01" * 32,
        "finish_reason": "stop",
        "model": "kvloop@v1",
        "weights_id": "a" * 64,
    }
    return NewResponse(session_id=session_id, tenant=tenant, parent_response=parent, **(values | extra))
