"""The store through its public face: what was saved comes back bit for bit, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memory.kv.settings import KVSettings
from memory.kv.store import KVStore
from tests.memory.kv.common import identity, kv_of, open_store, prompt, restore


def test_a_saved_sequence_is_restored_bit_for_bit_by_another_process_life(tmp_path: Path) -> None:
    ids = prompt(100)
    with open_store(tmp_path) as store:
        store.save(identity(), ids, kv_of(ids))
        assert restore(store, ids) == 100
        assert store.stats().disk_tokens == 0, "RAM has it at once"
    with open_store(tmp_path) as store:
        match = store.match(identity(), ids + prompt(30, seed=9))
        assert [chunk.tokens for chunk in match.chunks] == [32, 32, 32, 4]
        assert match.tokens == 100
        assert match.bytes == match.disk_bytes > 0
        assert restore(store, ids) == 100
        assert store.stats().disk_tokens == 100
