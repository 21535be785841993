"""Random sequences of everything a store is asked to do, against a model that is a dictionary.

The model knows which tokens were saved for whom and which owners were forgotten. Whatever the store may have lost,
what it hands out must be right, and nothing of a forgotten owner may be handed out, nor may the budget be exceeded.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memory.kv.codec.base import Kept
from memory.kv.fidelity import RUNGS, Fidelity, at_least
from memory.kv.identity import KVIdentity
from memory.kv.store import KVStore
from memory.kv.tiers.index import Victim
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt
from tests.memory.kv.rungs import disk_of, expected, trust, use_rungs

BUDGET = 60_000
OWNERS = ["", "one", "two", "three"]
TENANTS = [identity(), identity(tenant_secret="other")]
FIDELITIES: list[Fidelity] = list(RUNGS)
sequences = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(1, 5 * CHUNK))
tenants = st.sampled_from(TENANTS)


def ids_of(sequence: tuple[int, int, int]) -> list[int]:
    """Sequences that begin alike and then part."""
    stem, branch, tokens = sequence
    return (prompt(2 * CHUNK, seed=stem) + prompt(3 * CHUNK, seed=10 + branch))[:tokens]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        use_rungs(self.patch)

    @initialize(encryption=st.booleans(), remote=st.booleans())
    def open(self, encryption: bool, remote: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvloop-test-"))
        self.options = {
            "encryption": encryption,
            "ram_bytes": 20_000,
            "disk_bytes": BUDGET,
            "high_water": 0.6,
            "remote_url": f"file://{self.folder}/far" if remote else None,
        }
        self.store = self.another()
        for rung in ("int8", "int4"):
            trust(self.store, rung)  # type: ignore[arg-type]
        self.saved: dict[tuple[int, bytes], set[tuple[str, Fidelity]]] = {}
        self.forgotten: set[tuple[int, str]] = set()

    def another(self) -> KVStore:
        return open_store(self.folder / "kv", **self.options)

    @rule(of=tenants, sequence=sequences, owner=st.sampled_from(OWNERS), fidelity=st.sampled_from(FIDELITIES))
    def save(self, of: KVIdentity, sequence: tuple[int, int, int], owner: str, fidelity: Fidelity) -> None:
        ids = ids_of(sequence)
        start = min(self.store.save_from(of, ids, fidelity=fidelity), len(ids) // CHUNK * CHUNK)
        self.store.save(of, ids, kv_of(ids, of)[:, :, :, start:], start, owner=owner, fidelity=fidelity)
        if (TENANTS.index(of), owner) not in self.forgotten:
            for end in range(1, len(ids) + 1):
                key = TENANTS.index(of), np.asarray(ids[:end], "<u4").tobytes()
                self.saved.setdefault(key, set()).add((owner, fidelity))

    @rule(of=tenants, sequence=sequences, least=st.sampled_from(FIDELITIES))
    def load(self, of: KVIdentity, sequence: tuple[int, int, int], least: Fidelity) -> None:
        ids = ids_of(sequence)
        match = self.store.match(of, ids, least=least)
        out = np.zeros(of.shape(len(ids)), of.dtype)
        end = 0
        for loaded in self.store.load_from(of, match, out):
            assert RUNGS.index(loaded.fidelity) <= RUNGS.index(least)
            part, end = slice(end, end + loaded.tokens), end + loaded.tokens
            sources = self.saved.get((TENANTS.index(of), np.asarray(ids[:end], "<u4").tobytes()), set())
            alive = {how for owner, how in sources if (TENANTS.index(of), owner) not in self.forgotten}
            assert alive, "nobody who is remembered has saved this"
            best = min(RUNGS.index(how) for how in alive)
            assert RUNGS.index(loaded.fidelity) >= best, "it says to be better than it was ever computed"
            right = [expected(ids, rung, of)[:, :, :, part] for rung in RUNGS if at_least(rung, loaded.fidelity)]
            assert any(np.array_equal(out[:, :, :, part], kv) for kv in right)
        assert end <= match.tokens <= len(ids)

    @rule(of=tenants, owner=st.sampled_from(OWNERS[1:]))
    def forget(self, of: KVIdentity, owner: str) -> None:
        self.store.forget_owners(of.tenant_secret, [owner])
        self.forgotten.add((TENANTS.index(of), owner))

    @rule(of=tenants, owner=st.sampled_from(OWNERS[1:]))
    def forget_elsewhere(self, of: KVIdentity, owner: str) -> None:
        with self.another() as other:
            other.forget_owners(of.tenant_secret, [owner])
        self.forgotten.add((TENANTS.index(of), owner))

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.another()

    @rule()
    def lose_the_index(self) -> None:
        assert self.store.flush(20)
        (self.folder / "kv" / "index.db").unlink(missing_ok=True)

    @rule()
    def empty_the_ram(self) -> None:
        assert self.store.flush(20)
        self.store._ram.clear()

    @rule(size=st.integers(1, 60_000))
    def scrub(self, size: int) -> None:
        assert self.store.flush(20)
        assert self.store.upkeep is not None
        self.store.upkeep.step(size)

    @rule(rung=st.sampled_from(FIDELITIES[1:3]))
    def move_down(self, rung: Fidelity) -> None:
        assert self.store.flush(20)
        disk = disk_of(self.store)
        for victim in self.victims()[:2]:
            disk.rewrite(victim.key, rung, Kept(head=4, tail=8))

    @rule()
    def move_out(self) -> None:
        assert self.store.flush(20)
        disk = disk_of(self.store)
        victims = self.victims()
        with disk.exclusive():
            for victim in victims[:2]:
                disk._room.move_out(disk.index, victim, disk.remote)

    def victims(self) -> list[Victim]:
        disk_of(self.store).maintain()
        return disk_of(self.store).index.least_worth(99)

    @rule()
    def clear(self) -> None:
        disk_of(self.store).maintain()
        self.store.clear()

    @invariant()
    def the_budgets_hold_to_the_byte(self) -> None:
        assert self.store.flush(20)
        sizes = [path.stat().st_size for path in (self.folder / "kv").glob("chunks/?/?/*.kv")]
        assert sum(sizes) <= BUDGET
        disk = disk_of(self.store)
        if disk.index.is_current():
            assert (len(sizes), sum(sizes)) == disk.index.totals()[::2]
        assert not list((self.folder / "kv").rglob("*.tmp"))
        stats = self.store.stats()
        assert stats.ram.bytes <= 20_000
        assert stats.write_errors == stats.read_errors == stats.index_errors == stats.quarantined == 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)
        self.patch.undo()


Machine.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestMachine = Machine.TestCase
