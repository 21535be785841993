"""Settings are documented, frozen, and refuse what makes no sense."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from memory.kv.settings import KVSettings


def test_every_setting_is_documented() -> None:
    assert [name for name, field in KVSettings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    "bad", [{"chunk_tokens": 0}, {"ram_bytes": -1}, {"load_threads": 0}, {"chunk_tokens": 8}, {"chunk_token": 256}]
)
def test_settings_that_make_no_sense_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        KVSettings(**bad)  # type: ignore[arg-type]
