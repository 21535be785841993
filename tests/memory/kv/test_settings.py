"""Settings are documented, frozen, and refuse what makes no sense."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from memory.kv.fidelity import RUNGS
from memory.kv.settings import KVSettings


def test_every_setting_is_documented() -> None:
    assert [name for name, field in KVSettings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    "bad",
    [
        {"chunk_tokens": 0},
        {"ram_bytes": -1},
        {"load_threads": 0},
        {"chunk_tokens": 8},
        {"chunk_token": 256},
        {"codec": "zip"},
        {"ttl_seconds": 0},
        {"high_water": 0},
        {"high_water": 1.1},
        {"int8_max_kl": -0.1},
    ],
)
def test_settings_that_make_no_sense_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        KVSettings.model_validate(bad)


def test_every_rung_has_its_age_and_its_limit() -> None:
    settings = KVSettings(int8_after_seconds=1, int4_after_seconds=None, compact_max_kl=0.1)
    assert set(settings.max_kl) == set(settings.after_seconds) == set(RUNGS)
    assert (settings.after_seconds["int8"], settings.after_seconds["int4"]) == (1, None)
    assert settings.max_kl["compact"] == 0.1
