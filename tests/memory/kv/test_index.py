"""The index: sums that are always right, questions answered in order, damage found, rows read back from files."""

from __future__ import annotations

import multiprocessing
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.kv.chunk import BadChunk, ChunkHeader, OldChunk, body_bytes, pack_chunk
from memory.kv.tiers.index import Index, IndexDamaged, IndexMissing, Row, is_damage
from memory.kv.tiers.rebuild import read_row, scan_rows
from tests.memory.kv.rows import NOBODY, OWNER, ROOT, chunk_file, key, row, write_file


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """An empty index in a file."""
    opened = Index.build(tmp_path / "index.db", ())
    yield opened
    opened.close()


def sums(index: Index) -> dict[str, tuple[int, int, int]]:
    """What the totals should be: added up over the rows."""
    tiers: dict[str, tuple[int, int, int]] = {"disk": (0, 0, 0), "remote": (0, 0, 0)}
    rows = index.rows([key(number) for number in range(300)]).values()
    for entered in rows:
        chunks, tokens, size = tiers[entered.tier]
        tiers[entered.tier] = (chunks + 1, tokens + entered.tokens, size + entered.size)
    return tiers


NUMBERS = st.integers(0, 12)
STEPS: dict[str, Any] = {
    "add": st.tuples(NUMBERS, st.integers(0, 500), st.integers(1, 64), st.sampled_from(["disk", "remote"])),
    "enter": st.tuples(NUMBERS, st.integers(0, 500)),
    "stored": st.tuples(NUMBERS),
    "remove": st.tuples(NUMBERS),
    "rewritten": st.tuples(NUMBERS, st.integers(0, 500)),
    "moved": st.tuples(NUMBERS, st.sampled_from(["disk", "remote"]), st.integers(0, 500)),
    "touch": st.tuples(NUMBERS),
}


def take(index: Index, step: str, values: tuple[Any, ...]) -> None:
    number, *rest = values
    if step == "add":
        size, tokens, tier = rest
        known = index.rows([key(number)])
        tokens = known[key(number)].tokens if known else tokens  # a key's tokens never change
        index.add([row(number, size=size, tokens=tokens, tier=tier)])
    elif step == "enter":
        tokens = next((entered.tokens for entered in index.rows([key(number)]).values()), 32)
        index.enter(row(number, size=rest[0], tokens=tokens))
    elif step == "stored":
        index.stored(key(number))
    elif step == "remove":
        index.remove([key(number)])
    elif step == "rewritten":
        known = index.rows([key(number)])
        index.add(replace(found, size=rest[0], codec="int8", fidelity="int8") for found in known.values())
    elif step == "moved":
        index.moved(key(number), *rest)
    else:
        index.touch([(key(number), 5000.0, 1)])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(*(st.tuples(st.just(name), values) for name, values in STEPS.items())), max_size=25))
def test_the_totals_are_the_sums_whatever_happens(steps: list[tuple[str, tuple[Any, ...]]]) -> None:
    index = Index(None)
    for step, values in steps:
        take(index, step, values)
        expected = sums(index)
        assert index.totals("disk") == expected["disk"]
        assert index.totals("remote") == expected["remote"]
    index.close()


def test_a_built_index_has_the_sums_of_its_rows(tmp_path: Path) -> None:
    rows = [row(number, size=number, tier="remote" if number % 3 else "disk") for number in range(100)]
    index = Index.build(tmp_path / "index.db", iter(rows))
    assert {"disk": index.totals("disk"), "remote": index.totals("remote")} == sums(index)
    index.add([row(200, size=7)])
    index.remove([key(0)])
    assert {"disk": index.totals("disk"), "remote": index.totals("remote")} == sums(index)
    index.close()


def test_only_what_is_stored_and_alive_is_found(index: Index) -> None:
    later, before = time.time() + 1000, time.time() - 1
    index.enter(row(1))
    index.add([row(2, tier="remote", codec="int4", fidelity="int4"), row(3, expires=before), row(4, expires=later)])
    found = index.find([key(number) for number in range(6)])
    assert set(found) == {key(2), key(4)}
    assert (found[key(2)].tier, found[key(2)].codec, found[key(2)].fidelity) == ("remote", "int4", "int4")
    assert {stored.key for stored in index.siblings(ROOT, 10)} == {key(2), key(4)}
    assert [entered.key for entered in index.writing()] == [key(1)]
    index.stored(key(1))
    assert set(index.find([key(1)])) == {key(1)}
    assert index.writing() == []


def test_many_keys_at_once(index: Index) -> None:
    index.add(row(number) for number in range(1300))
    assert len(index.find([key(number) for number in range(2000)])) == 1300
    assert len(index.rows([key(number) for number in range(2000)])) == 1300


def test_lengths_are_the_different_ones_in_order(index: Index) -> None:
    index.add(row(number, tokens=[16, 256, 7][number % 3]) for number in range(300))
    index.add([row(500, parent=key(1), tokens=9)])
    assert index.lengths(ROOT) == [7, 16, 256]
    assert index.lengths(key(1)) == [9]
    assert index.lengths(key(2)) == []
    assert (index.longest_child(ROOT), index.longest_child(key(2))) == (256, 0)


def test_siblings_come_most_recently_used_first(index: Index) -> None:
    index.add(row(number, last_used=float(number)) for number in range(10))
    index.touch([(key(2), 100.0, 0)])
    assert [stored.key for stored in index.siblings(ROOT, 3)] == [key(2), key(9), key(8)]


def test_what_is_worth_least_leaves_first(index: Index) -> None:
    index.add([row(number, last_used=10_000.0, start=32 * number, parent=key(900)) for number in range(4)])
    index.add([row(10, last_used=9_000.0), row(11, last_used=8_000.0), row(12, last_used=7_000.0, tier="remote")])
    index.touch([(key(11), 8_000.0, 1)])  # one reuse of a first chunk is worth an hour
    index.supersede([key(10), key(0)])
    index.supersede([key(0)])  # twice is once
    leaving = [victim.key for victim in index.least_worth(10)]
    assert leaving == [key(10), key(0), key(3), key(2), key(1), key(11)]
    assert [victim.key for victim in index.least_worth(2, skip=1)] == leaving[1:3]
    assert [victim.key for victim in index.least_worth(10, "remote")] == [key(12)]
    index.touch([(key(0), 10_000.0, 1)])  # a hit makes it worth its time again
    leaving = [victim.key for victim in index.least_worth(10)]
    assert (leaving[0], leaving[-1]) == (key(10), key(0))


def test_a_use_never_makes_a_chunk_older_and_tells_what_is_missing(index: Index) -> None:
    index.add([row(1, last_used=50.0)])
    assert index.touch([(key(1), 20.0, 0), (key(2), 20.0, 0)]) == [key(2)]
    assert index.rows([key(1)])[key(1)].last_used == 50.0


def test_a_chunk_entered_again_keeps_its_hits_and_last_use(index: Index) -> None:
    index.add([row(1, codec="int4", fidelity="int4", last_used=10.0)])
    index.touch([(key(1), 900.0, 5)])
    index.add([row(1, codec="exact", size=999, last_used=20.0)])
    found = index.find([key(1)])[key(1)]
    assert (found.codec, found.fidelity, found.size, found.hits) == ("exact", "exact", 999, 5)
    assert index.rows([key(1)])[key(1)].last_used == 900.0


def test_cold_chunks_by_codec(index: Index) -> None:
    index.add(row(number, last_used=float(number), codec="int8" if number % 2 else "exact") for number in range(8))
    index.add([row(20, last_used=0.5, tier="remote"), row(21, last_used=0.5, state="writing")])
    index.add([row(30, last_used=0.5, model=b"a" * 16), row(31, model=b"z" * 16, tier="remote")])
    model = b"m" * 16
    assert index.models() == [b"a" * 16, model]
    assert index.colder_than(model, "exact", 5.0, 10) == [key(0), key(2), key(4)]
    assert index.colder_than(model, "exact", 5.0, 1, skip=1) == [key(2)]
    assert index.colder_than(model, "int8", 5.0, 1) == [key(1)]
    index.add([row(0, codec="int8", fidelity="int8", size=10)])
    assert index.colder_than(model, "exact", 5.0, 10) == [key(2), key(4)]
    assert index.rows([key(0)])[key(0)].last_used == 0.0


def test_owners_ends_and_holdings(index: Index) -> None:
    index.add([row(1, owner=OWNER), row(2, owner=OWNER, tier="remote", state="writing"), row(3)])
    assert set(index.by_owner(OWNER)) == {key(1), key(2)}
    index.add([row(4, expires=5.0), row(5, expires=4.0), row(6, expires=6.0), row(7)])
    assert index.expired(5.0, 10) == [key(5), key(4)]
    assert index.expired(5.0, 1) == [key(5)]
    index.add([row(8, codec="int4", fidelity="int4", size=30), row(9, codec="int4", fidelity="int4", size=31)])
    held = {(entry.codec, entry.fidelity): entry for entry in index.holdings()}
    lossy = held["int4", "int4"]
    assert (lossy.chunks, lossy.tokens, lossy.bytes, lossy.raw_bytes, lossy.band) == (2, 64, 61, 800, "all")
    assert sum(entry.chunks for entry in held.values()) == 9


def test_the_walk_over_all_keys(index: Index) -> None:
    index.add(row(number) for number in range(50))
    index.enter(row(60))
    seen, at = [], b""
    while places := index.places_after(at, 7):
        seen += [place.key for place in places]
        at = seen[-1]
    assert seen == sorted(key(number) for number in range(50))
    low, high = sorted((key(1), key(60)))
    assert index.entered(low, high) == {name for name in [*seen, key(60)] if low <= name <= high}


def test_facts_last_as_long_as_the_index(tmp_path: Path, index: Index) -> None:
    assert index.fact("cursor") is None
    index.note("cursor", b"1")
    index.note("cursor", b"2")
    again = Index(tmp_path / "index.db")
    assert again.fact("cursor") == b"2"
    again.close()


def test_an_index_is_missing_until_it_was_completed(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    with pytest.raises(IndexMissing) as missing:
        Index(path)
    assert is_damage(missing.value)

    def interrupted() -> Iterator[Row]:
        yield from (row(number) for number in range(1000))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Index.build(path, interrupted())
    with pytest.raises(IndexMissing):
        Index(path)
    Index.build(path, [row(1)]).close()
    index = Index(path)
    assert index.totals() == (1, 32, 100)
    index.close()


def test_building_replaces_what_is_there_and_others_notice(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    first = Index.build(path, [row(1)])
    second = Index.build(path, [row(2)])
    assert (first.is_current(), second.is_current()) == (False, True)
    assert set(second.find([key(1), key(2)])) == {key(2)}
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    first.close()
    second.close()


@pytest.mark.parametrize("how", ["older schema", "cut short", "no totals", "zeros"])
def test_damage_is_found_when_it_is_opened(tmp_path: Path, how: str) -> None:
    path = tmp_path / "index.db"
    Index.build(path, (row(number) for number in range(500))).close()
    data = path.read_bytes()
    if how == "cut short":
        path.write_bytes(data[: len(data) - 4096])
    elif how == "zeros":
        path.write_bytes(data[:4096] + bytes(len(data) - 4096))
    else:
        change = {"older schema": "PRAGMA user_version = 1", "no totals": "DELETE FROM totals"}[how]
        other = sqlite3.connect(path)
        other.execute(change)
        other.commit()
        other.close()
    with pytest.raises(sqlite3.Error) as found:
        Index(path)
    assert is_damage(found.value)


def test_a_row_of_nonsense_is_damage(tmp_path: Path, index: Index) -> None:
    index.add([row(1)])
    other = sqlite3.connect(tmp_path / "index.db")
    other.execute("UPDATE chunks SET fidelity = 'perfect'")
    other.commit()
    other.close()
    with pytest.raises(IndexDamaged):
        index.find([key(1)])


def test_nothing_struck_out_is_left_in_the_files(tmp_path: Path, index: Index) -> None:
    secret = b"a digest nobody may keep"
    index.add([row(number, prefix=secret) for number in range(40)])
    index.scrub()
    assert secret in (tmp_path / "index.db").read_bytes()
    index.remove([key(number) for number in range(40)])
    index.scrub()
    assert not any(secret in path.read_bytes() for path in tmp_path.iterdir())


def add_rows(path: Path, first: int) -> None:
    """In a process of its own: enters, touches and removes its rows."""
    index = Index(path)
    for number in range(first, first + 60):
        index.enter(row(number, size=10))
        index.stored(key(number))
        index.touch([(key(number), 5000.0, 1)])
        if number % 3 == 0:
            index.remove([key(number)])
    index.close()


def test_many_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    Index.build(path, ()).close()
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=add_rows, args=(path, 1000 * number)) for number in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    index = Index(path)
    assert index.totals() == (120, 120 * 32, 1200)
    index.close()


# rows from files


def scan(chunks: Path) -> tuple[list[Row], dict[bytes, type[Exception]]]:
    refused: dict[bytes, type[Exception]] = {}

    def refuse(name: bytes, error: Exception) -> None:
        refused[name] = type(error)

    return list(scan_rows(chunks, refuse)), refused


def test_rows_are_read_back_from_files(tmp_path: Path) -> None:
    chunks = tmp_path / "chunks"
    chunks.mkdir()
    assert scan(chunks) == ([], {})
    for number in range(20):
        write_file(chunks, number, chunk_file(number, codec="int4", fidelity="compact", owner=OWNER, expires=9e9))
    rows, refused = scan(chunks)
    assert refused == {}
    assert {entered.key for entered in rows} == {key(number) for number in range(20)}
    entered = next(found for found in rows if found.key == key(3))
    size = len(chunk_file(3))
    assert entered == row(
        3, size=size, codec="int4", fidelity="compact", owner=OWNER, expires=9e9, last_used=1003.0, raw_bytes=6144
    )


SPOILED: dict[str, tuple[Callable[[bytes], bytes], type[Exception]]] = {
    "short": (lambda data: data[:-1], BadChunk),
    "empty": (lambda data: b"", BadChunk),
    "header changed": (lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:], BadChunk),
    "digests changed": (lambda data: data[:513] + bytes([data[513] ^ 1]) + data[514:], BadChunk),
    "another chunk": (lambda data: chunk_file(99), BadChunk),
    "older format": (lambda data: data[:8] + (1).to_bytes(4, "little") + data[12:], OldChunk),
}


@pytest.mark.parametrize("how", SPOILED)
def test_what_is_no_chunk_gives_no_row(tmp_path: Path, how: str) -> None:
    spoil, error = SPOILED[how]
    write_file(tmp_path, 1)
    path = write_file(tmp_path, 2, spoil(chunk_file(2)))
    rows, refused = scan(tmp_path)
    assert [entered.key for entered in rows] == [key(1)]
    assert refused == {key(2): error}
    with pytest.raises(error):
        read_row(path, key(2))


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    path = write_file(tmp_path, 1)
    for name in ("notes.txt", f"{key(1).hex()}.kv.bak", f".{path.name}.1.tmp", f"{key(1).hex().upper()}.kv"):
        (path.parent / name).write_text("mine")
    (path.parent.parent.parent / "lost+found").mkdir()
    strange = tmp_path / "z" / "z"
    strange.mkdir(parents=True)
    (strange / path.name).write_bytes(path.read_bytes())  # not where this key belongs
    rows, refused = scan(tmp_path)
    assert ([entered.key for entered in rows], refused) == ([key(1)], {})


def test_a_chunk_of_very_many_tokens(tmp_path: Path) -> None:
    """Its digests do not fit the first read."""
    tokens = 16 * 1000
    header = ChunkHeader(
        key=key(1),
        parent=ROOT,
        identity=ROOT,
        model=b"m" * 16,
        band="all",
        start=0,
        shape=(1, 2, 1, tokens, 2),
        dtype="bfloat16",
        codec="exact",
        fidelity="exact",
        body_bytes=body_bytes(tokens, 10, encrypted=False),
        created=1.0,
        expires=0.0,
        owner=NOBODY,
    )
    prefix = np.random.default_rng(0).bytes(8000)
    data = bytes(pack_chunk(header, prefix, np.zeros(tokens, "<u4"), bytes(10), None))
    entered = read_row(write_file(tmp_path, 1, data), key(1))
    assert entered.prefix == prefix
    data = data[:8000] + bytes([data[8000] ^ 1]) + data[8001:]
    with pytest.raises(BadChunk):
        read_row(write_file(tmp_path, 1, data), key(1))
