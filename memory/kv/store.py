"""KV memory as the engine sees it: match, load, save, forget.

Invariants:
- `load` hands out a chunk only after it, its key, identity and token ids were proven, and only as exact as was asked
  for. A chunk that fails ends the restored prefix; it is quarantined and counted.
- `match` reads the index, never a chunk file; `save` copies and touches no disk. Both may be called on an event loop.
- Nothing that a disk does raises out of `match`, `load`, `save`, `flush`, `close` or `stats`. Arguments that make no
  sense do: `ValueError`.
- An expired chunk is not handed out. One whose owner was forgotten by another process leaves this one's memory at the
  next `match`, or at the one after it where the keyring is being changed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from memory.kv.codec.base import KVArray
from memory.kv.codec.factory import Codecs
from memory.kv.cost import CostModel
from memory.kv.counters import Counters, Event
from memory.kv.fidelity import Fidelity, FidelityRecords, at_least, worse
from memory.kv.forget import Forgotten
from memory.kv.identity import Chain, Ids, KVIdentity, TokenIds, owner_id, prefix_digests
from memory.kv.keyring import OwnerForgotten
from memory.kv.known import Known
from memory.kv.loading import Loaders, Place
from memory.kv.match import ChunkRef, Match, find_prefix
from memory.kv.settings import KVSettings
from memory.kv.stats import KVStats
from memory.kv.tiers.base import ChunkData, Holding, Lookup, TierName, TierStats
from memory.kv.tiers.disk import DiskTier
from memory.kv.tiers.ram import RamTier
from memory.kv.upkeep import Upkeep
from memory.kv.writer import Writer

logger = logging.getLogger(__name__)
CLOSE_SECONDS = 30.0
RESTORED: dict[TierName, Event] = {"ram": "ram_tokens", "disk": "disk_tokens", "remote": "remote_tokens"}


@dataclass(frozen=True, slots=True)
class Loaded:
    """One chunk, or the part of one, that was restored."""

    tokens: int
    tier: TierName
    """Where it came from."""
    fidelity: Fidelity


class KVStore:
    """The store in one folder. Thread-safe; many processes may open the same folder. Close it, or use `with`.

    Raises `KeyringError` (a `ValueError`) for a master key that cannot be used as it is.
    """

    def __init__(self, settings: KVSettings, folder: Path) -> None:
        self.settings = settings
        self.cost = CostModel(always=settings.restore == "always")
        self.codecs = Codecs(folder / "bases")
        self.fidelity = FidelityRecords(folder / "fidelity")
        self._counters = Counters()
        self._ram = RamTier(settings.ram_bytes)
        self._disk: DiskTier | None = None
        self._writer: Writer | None = None
        self.upkeep: Upkeep | None = None
        self._tiers: list[Lookup] = [self._ram]
        self._known = Known()  # what is on disk, so that `save` need not ask the index
        self._closed = False
        self._loaders = Loaders(min(settings.load_threads, len(os.sched_getaffinity(0))))
        if settings.disk_bytes:
            self._disk = DiskTier(settings, folder, self.codecs, self.fidelity, self._counters, self._known.unlearn)
            self._writer = Writer(
                self._write, self._disk.touch, self._written, settings.queue_bytes, settings.writer_nice
            )
            self._tiers += [self._writer, self._disk]
            self.upkeep = Upkeep(self._disk, settings, self.fidelity, self._counters)
            self.upkeep.start()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # finding

    def match(self, identity: KVIdentity, token_ids: TokenIds, *, least: Fidelity = "compact") -> Match:
        """The longest stored prefix of `token_ids`, of chunks at least that exact: full ones, then part of one more.

        Cheap: index lookups only. What it names may be gone when it is loaded.
        """
        if self._closed:
            return Match()
        self._hear()
        chain = Chain(identity, token_ids, self.settings.chunk_tokens)
        match = find_prefix(chain, self._tiers, self.settings.min_tokens, least)
        self._counters.add("hits" if match.chunks else "misses")
        durable = [chunk for chunk in match.chunks if chunk.tier != "ram"]
        self._known.learn((chunk.key, chunk.fidelity, chunk.owner, chunk.expires) for chunk in durable)
        missing = {*chain.keys, chain.tail_key(len(chain.keys), len(chain.ids) % chain.chunk_tokens)}
        self._known.unlearn(missing.difference(chunk.key for chunk in match.chunks))
        return match

    def save_from(self, identity: KVIdentity, token_ids: TokenIds, *, fidelity: Fidelity = "exact") -> int:
        """The first position whose KV `save` would need, a multiple of `chunk_tokens`; from memory, no disk."""
        chain = Chain(identity, token_ids, self.settings.chunk_tokens)
        for number, key in enumerate(chain.keys):
            if not self._is_kept(key, fidelity):
                return number * self.settings.chunk_tokens
        return len(chain.keys) * self.settings.chunk_tokens

    def _hear(self) -> None:
        """Drops what other processes were told to forget."""
        owners = self._disk.keys.news() if self._disk is not None else []
        if owners:
            self._drop(set(owners))

    # loading

    def load(self, identity: KVIdentity, match: Match, out: KVArray) -> int:
        """As `load_from`; returns only how many tokens were restored."""
        return sum(loaded.tokens for loaded in self.load_from(identity, match, out))

    def load_from(self, identity: KVIdentity, match: Match, out: KVArray) -> list[Loaded]:
        """Restores the chunks of `match` into `out[..., :tokens, :]`; tells of each how, in order.

        That may be from another tier than was matched: chunks move meanwhile. `out` is `[layers, 2, kv_heads, at least
        match.tokens, head_dim]` of the identity's dtype. Beyond the tokens returned it holds anything. `identity` must
        be the one that was matched, else nothing is restored.
        """
        _check(identity, out, _end(match), "out")
        started = time.perf_counter()
        restored = list(zip(match.chunks, self._restore(identity, match, out), strict=False))
        if restored:
            self._account(restored, time.perf_counter() - started)
            self._promote(identity, restored)
        return [loaded for _, loaded in restored]

    def _restore(self, identity: KVIdentity, match: Match, out: KVArray) -> list[Loaded]:
        """How the chunks came, in order, up to the first that did not come."""
        digest = identity.digest()
        if self._closed or any(chunk.identity != digest for chunk in match.chunks):
            return []
        found: list[Loaded] = []
        for chunk in match.chunks:  # what memory holds needs no thread, for threads may hang on a disk
            held = self._from_memory(match.least, chunk, _part(out, chunk))
            if held is None:
                break
            found.append(held)
        rest = match.chunks[len(found) :]
        return found + self._restore_on_threads(identity, match.least, rest, out) if rest else found

    def _restore_on_threads(
        self, identity: KVIdentity, least: Fidelity, chunks: Sequence[ChunkRef], out: KVArray
    ) -> list[Loaded]:
        ahead = self._disk.read_ahead(chunks) if self._disk is not None else None

        def restore(chunk: ChunkRef, place: Place) -> Loaded | None:
            if ahead is not None:
                ahead.reach(chunk)
            return self._restore_one(identity, least, chunk, _part(out, chunk), place)

        found, stalled = self._loaders.run(chunks, restore, self.settings.stall_seconds)
        if self._disk is not None and (stalled or any(loaded.tier == "disk" for loaded in found)):
            self._disk.came(stalled=stalled)
        left_out = chunks[len(found) :]
        self._known.unlearn(chunk.key for chunk in left_out)  # where one is gone, the next save looks for all
        if self._disk is not None and not stalled:
            self._disk.give_up(left_out)
        return found

    def _restore_one(
        self, identity: KVIdentity, least: Fidelity, chunk: ChunkRef, out: KVArray, place: Place
    ) -> Loaded | None:
        with place.writing():
            held = self._from_memory(least, chunk, out)
        if held is not None:
            return held
        fidelity = self._disk.read(chunk, identity, least, out, place) if self._disk is not None else None
        if fidelity is not None:
            return Loaded(chunk.tokens, "remote" if chunk.tier == "remote" else "disk", fidelity)
        return None

    def _from_memory(self, least: Fidelity, chunk: ChunkRef, out: KVArray) -> Loaded | None:
        """The chunk out of RAM or out of what waits to be written; None where neither has it."""
        held = self._ram.get(chunk.key) or (self._writer.get(chunk.key) if self._writer else None)
        if held is None or not _serves(held, least, chunk):
            return None
        out[...] = held.kv[:, :, :, : chunk.tokens]
        return Loaded(chunk.tokens, "ram", held.fidelity)

    def _account(self, restored: list[tuple[ChunkRef, Loaded]], seconds: float) -> None:
        for _, loaded in restored:
            self._counters.add(RESTORED[loaded.tier], loaded.tokens)
        self.cost.observe_load([(loaded.tier, chunk.codec, chunk.size) for chunk, loaded in restored], seconds)
        self._use([chunk.key for chunk, _ in restored], time.time(), hits=1)

    def _promote(self, identity: KVIdentity, restored: list[tuple[ChunkRef, Loaded]]) -> None:
        """Has chunks taken into RAM that came from disk for the second time: after the first, the engine has them."""
        again = [chunk for chunk, how in restored if how.tier == "disk" and chunk.whole and chunk.hits > 0]
        if self._writer is not None and again and self.settings.ram_bytes:
            self._writer.later(self._to_ram(identity, again, time.time()))

    def _to_ram(self, identity: KVIdentity, chunks: list[ChunkRef], stamp: float) -> Iterator[None]:
        """One by one, on the writer's thread: whoever waits for an answer does not wait for this as well."""
        assert self._disk is not None
        end = chunks[-1].start + chunks[-1].tokens
        for chunk in chunks:
            if self._ram.get(chunk.key) is None:
                kv = np.empty(identity.shape(chunk.tokens), identity.dtype)
                fidelity = self._disk.read(chunk, identity, chunk.fidelity, kv, Place())
                if fidelity is None:
                    return
                take = _Take(identity, identity.digest(), chunk.owner, fidelity, chunk.expires, stamp)
                ids, follows = np.frombuffer(chunk.ids, "<u4"), end - chunk.start - chunk.tokens
                if not self._ram.put(take.chunk(chunk.key, chunk.parent, chunk.start, ids, kv, follows)):
                    return
                self._forget_late(chunk.owner)
            yield

    # saving

    def save(
        self,
        identity: KVIdentity,
        token_ids: TokenIds,
        kv: KVArray,
        start: int = 0,
        *,
        owner: str = "",
        fidelity: Fidelity = "exact",
        expires: float | None = None,
    ) -> None:
        """Takes in the KV of `token_ids`: what is not stored yet, or less exact, is copied to RAM and queued for disk.

        `kv` is `[layers, 2, kv_heads, len(token_ids) - start, head_dim]`: the tokens from `start` on, a multiple of
        `chunk_tokens`. Any strides; it may be overwritten once this returns. A tail below `min_tokens` is left out.
        `fidelity` is that of the least exact KV that it was computed over. New chunks belong to `owner` and are not
        handed out after `expires`, seconds since the epoch, or `ttl_seconds` from now, whichever is first.
        """
        size = self.settings.chunk_tokens
        if start % size or not 0 <= start <= len(token_ids):
            raise ValueError(f"start {start} must be a multiple of {size} within the {len(token_ids)} tokens")
        _check(identity, kv, len(token_ids) - start, "kv", exact=True)
        stamp = time.time()
        ends = self._expires(stamp, expires)
        if self._closed or 0 < ends <= stamp:
            return
        chain = Chain(identity, token_ids, size)
        keys = list(chain.keys)
        tail = len(chain.ids) - len(keys) * size
        if tail >= self.settings.min_tokens:
            keys.append(chain.tail_key(len(keys), tail))
        take = _Take(identity, chain.root, owner_id(identity.tenant_secret, owner), fidelity, ends, stamp)
        if self._known.is_forgotten(take.owner):
            self._counters.add("dropped", len(keys))
            return
        self._use(keys, stamp, hits=0)
        for number, key in enumerate(keys):
            if self._is_kept(key, fidelity):
                tokens = min(size, len(chain.ids) - number * size)
                self._counters.add("shared_tokens", tokens if self._known.shares(key, take.owner) else 0)
            elif number * size >= start:
                self._keep(take, chain, number, key, kv[:, :, :, number * size - start :])
        self._ram.touch(keys, stamp)
        self._forget_late(take.owner)

    def _forget_late(self, owner: bytes) -> None:
        """Drops what was taken in for an owner while it was being forgotten."""
        if self._known.is_forgotten(owner):
            self._drop({owner})

    def _expires(self, now: float, expires: float | None) -> float:
        ends = [expires] if expires is not None else []
        if self.settings.ttl_seconds is not None:
            ends.append(now + self.settings.ttl_seconds)
        return min(ends, default=0.0)

    def _keep(self, take: _Take, chain: Chain, number: int, key: bytes, kv: KVArray) -> None:
        """Takes in one chunk of a sequence; `kv` begins with its first token."""
        chunk = self._ram.get(key)
        if chunk is None or not at_least(chunk.fidelity, take.fidelity):
            position = number * self.settings.chunk_tokens
            ids = chain.ids[position : position + self.settings.chunk_tokens]
            follows = len(chain.ids) - position - len(ids)
            chunk = take.chunk(key, chain.parent(number), position, ids, kv[:, :, :, : len(ids)], follows)
            self._counters.add("saved_tokens", chunk.tokens)
            if self._ram.put(chunk):
                shorter = [length for length in self._ram.lengths(chunk.parent) if length < chunk.tokens]
                self._ram.supersede(chain.tail_key(number, length) for length in shorter)
        if self._writer is not None and not self._writer.submit(chunk):
            self._counters.add("dropped")

    def _use(self, keys: Sequence[bytes], stamp: float, hits: int) -> None:
        """Notes that a chain was used, so that it stays; before new chunks ask for room, and with one time for all."""
        self._ram.touch(keys, stamp)
        if self._writer is not None:
            self._writer.use(keys, stamp, hits)

    def _is_kept(self, key: bytes, fidelity: Fidelity) -> bool:
        """Whether the chunk is where it should end up, as exact as it would be there: on disk or on its way there; in
        RAM without a disk tier."""
        if self._writer is None:
            held = self._ram.get(key)
            return held is not None and at_least(held.fidelity, fidelity)
        if self._known.has(key, worse(fidelity, self.settings.codec)):
            return True
        waiting = self._writer.get(key)
        return waiting is not None and at_least(waiting.fidelity, fidelity)

    def _write(self, chunk: ChunkData) -> bool:
        """On the writer's thread: stores a chunk; one whose owner was forgotten leaves RAM as well."""
        assert self._disk is not None
        try:
            return self._disk.write(chunk)
        except OwnerForgotten:
            self._counters.add("dropped")
            self._known.forget({chunk.owner})
            self._ram.forget(self._ram.owned_by({chunk.owner}))
            return False

    def _written(self, chunk: ChunkData) -> None:
        self._known.learn([(chunk.key, worse(chunk.fidelity, self.settings.codec), chunk.owner, chunk.expires)])

    # upkeep

    def flush(self, timeout: float) -> bool:
        """Waits until nothing is left to write; False when that takes longer than `timeout` seconds."""
        return self._writer.flush(timeout) if self._writer else True

    def close(self) -> None:
        """Writes what is queued, for `CLOSE_SECONDS` at most, and frees everything. The store is empty afterwards."""
        if self._closed:
            return
        self._closed = True
        if self._writer is not None and not self._writer.close(CLOSE_SECONDS):
            logger.warning("KV memory was closed with chunks still to write")
        if self.upkeep is not None:
            self.upkeep.close()
        self._loaders.close()
        if self._disk is not None:
            self._disk.close()
        self._ram.clear()

    def forget_owners(self, tenant_secret: str, owners: Iterable[str]) -> Forgotten:
        """Forgets these owners of a tenant for ever: their keys first, then their chunks in every tier, refused files
        included. What is saved for them later is not stored.

        Other processes on the folder drop what they hold in RAM at their next `match`. Raises `OSError` or
        `sqlite3.Error` when the disk keeps something: a deletion must not fail unseen. It can be asked for again.
        """
        ids = {owner_id(tenant_secret, owner) for owner in owners}
        keys = self._disk.keys.destroy(sorted(ids)) if self._disk is not None else 0
        forgotten = replace(self._drop(ids), keys=keys)
        return self._disk.forget(sorted(ids), forgotten) if self._disk is not None else forgotten

    def _drop(self, owners: set[bytes]) -> Forgotten:
        """Takes the chunks of these owners out of memory; what comes for them later is not taken in."""
        self._known.forget(owners)  # first: who takes something in looks at this afterwards
        keys = self._ram.owned_by(owners)
        dropped = self._ram.forget(keys)
        waiting: list[bytes] = []
        if self._writer is not None:
            waiting = self._writer.owned_by(owners)
        cancelled = self._writer.cancel(waiting) if self._writer is not None and waiting else 0
        self._known.unlearn((*keys, *waiting))  # afterwards: what was being written is known by now
        return Forgotten(ram=dropped, waiting=cancelled)

    def clear(self) -> None:
        """Deletes everything, for every owner and tenant; nobody is forgotten by it. Raises as `forget_owners` does."""
        if self._writer is not None:
            self._writer.cancel()
        self._ram.clear()
        if self._disk is not None:
            self._disk.clear()
        self._known.clear()

    def report(self) -> list[Holding]:
        """What the disk and the remote tier hold, by model, band, codec and fidelity. Reads the whole index."""
        return self._disk.report() if self._disk is not None else []

    def stats(self) -> KVStats:
        """Sizes of the tiers and counts of this process."""
        count = self._counters.get
        nothing = TierStats(0, 0, 0, 0)
        return KVStats(
            ram=self._ram.stats(),
            disk=self._disk.stats() if self._disk else nothing,
            remote=self._disk.remote_stats() if self._disk else nothing,
            hits=count("hits"),
            misses=count("misses"),
            saved_tokens=count("saved_tokens"),
            shared_tokens=count("shared_tokens"),
            restored_tokens=count("ram_tokens") + count("disk_tokens") + count("remote_tokens"),
            ram_tokens=count("ram_tokens"),
            disk_tokens=count("disk_tokens"),
            remote_tokens=count("remote_tokens"),
            quarantined=count("quarantined"),
            lost=count("lost"),
            locked=count("locked"),
            expired=count("expired"),
            read_errors=count("read_errors"),
            write_errors=count("write_errors"),
            index_errors=count("index_errors"),
            index_rebuilds=count("index_rebuilds"),
            dropped=count("dropped"),
            evictions=count("evictions") + self._ram.evictions,
            waiting_bytes=self._writer.waiting_bytes if self._writer else 0,
            disk_trouble=self._disk.trouble if self._disk else "",
        )


@dataclass(frozen=True, slots=True)
class _Take:
    """What the chunks that are taken in together have in common."""

    identity: KVIdentity
    digest: bytes
    owner: bytes
    fidelity: Fidelity
    expires: float
    stamp: float

    def chunk(self, key: bytes, parent: bytes, start: int, ids: Ids, kv: KVArray, follows: int) -> ChunkData:
        """A chunk with a copy of `kv` of its own."""
        copy = np.array(kv, order="C", copy=True)
        copy.flags.writeable = False
        return ChunkData(
            key=key,
            parent=parent,
            identity=self.digest,
            model=self.identity.model_digest(),
            band=self.identity.band,
            weights_id=self.identity.weights_id,
            tenant_secret=self.identity.tenant_secret,
            owner=self.owner,
            start=start,
            ids=ids.copy(),
            prefix=prefix_digests(parent, ids, self.digest),
            kv_dtype=self.identity.kv_dtype,
            kv=copy,
            fidelity=self.fidelity,
            follows=follows,
            expires=self.expires,
            stamp=self.stamp,
        )


def _serves(held: ChunkData, least: Fidelity, chunk: ChunkRef) -> bool:
    """Whether a chunk in memory, found by its key, is what was matched, exact enough and not expired."""
    return (
        held.ids[: chunk.tokens].tobytes() == chunk.ids
        and at_least(held.fidelity, least)
        and not held.expired(time.time())
    )


def _end(match: Match) -> int:
    return match.chunks[-1].start + match.chunks[-1].tokens if match.chunks else 0


def _part(out: KVArray, chunk: ChunkRef) -> KVArray:
    return out[:, :, :, chunk.start : chunk.start + chunk.tokens]


def _check(identity: KVIdentity, kv: KVArray, tokens: int, name: str, *, exact: bool = False) -> None:
    """Raises `ValueError` where an array does not fit the identity."""
    shape, wanted = kv.shape, identity.shape(tokens)
    fits = len(shape) == 5 and shape[:3] + shape[4:] == wanted[:3] + wanted[4:]
    if not fits or shape[3] < tokens or (exact and shape[3] != tokens):
        raise ValueError(f"{name} has shape {shape}, expected {wanted}{'' if exact else ' or more tokens'}")
    if kv.dtype != identity.dtype:
        raise ValueError(f"{name} is {kv.dtype}, {identity.kv_dtype} travels as {identity.dtype}")
