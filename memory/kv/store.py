"""KV memory as the engine sees it: match, load, save.

Invariants:
- `load` hands out a chunk only after its checksum, key, identity and token ids were proven. A chunk that fails ends
  the restored prefix; it is quarantined and counted.
- `match` reads the index, never a chunk file; `save` copies and touches no disk. Both may be called on an event loop.
- Nothing that a disk does raises out of `match`, `load`, `save`, `flush`, `close` or `stats`. Arguments that make no
  sense do: `ValueError`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from memory.kv.codec.base import KVArray
from memory.kv.codec.factory import codec_named
from memory.kv.cost import CostModel
from memory.kv.counters import Counters
from memory.kv.forget import Doomed, Forgotten, keys_holding
from memory.kv.identity import Chain, KVIdentity, TokenIds, key_of
from memory.kv.match import ChunkRef, Match, find_prefix
from memory.kv.settings import KVSettings
from memory.kv.stats import KVStats
from memory.kv.tiers.base import ChunkData, Lookup, TierName, TierStats
from memory.kv.tiers.disk import DiskTier
from memory.kv.tiers.ram import RamTier
from memory.kv.writer import Writer

logger = logging.getLogger(__name__)
CLOSE_SECONDS = 30.0
KNOWN_KEYS = 1 << 18


class KVStore:
    """The store in one folder. Thread-safe; many processes may open the same folder. Close it, or use `with`.

    Raises `ValueError` for a codec that does not exist.
    """

    def __init__(self, settings: KVSettings, folder: Path) -> None:
        codec_named(settings.codec)
        self.settings = settings
        self.cost = CostModel()
        self._counters = Counters()
        self._ram = RamTier(settings.ram_bytes)
        self._disk: DiskTier | None = None
        self._writer: Writer | None = None
        self._tiers: list[Lookup] = [self._ram]
        self._known: dict[bytes, None] = {}  # keys seen on disk, so that `save` need not ask the index
        self._known_lock = threading.Lock()
        self._closed = False
        self._pool = ThreadPoolExecutor(settings.load_threads, thread_name_prefix="kvloop-kv-load")
        if settings.disk_bytes:
            self._disk = DiskTier(settings, folder, self._counters, self._unlearn)
            self._writer = Writer(
                self._disk.write, self._disk.touch, self._learn, settings.queue_bytes, settings.writer_nice
            )
            self._tiers += [self._writer, self._disk]

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # finding

    def match(self, identity: KVIdentity, token_ids: TokenIds) -> Match:
        """The longest stored prefix of `token_ids`: full chunks, then the part of one more that agrees.

        Cheap: index lookups only. What it names may be gone when it is loaded.
        """
        if self._closed:
            return Match()
        chain = Chain(identity, token_ids, self.settings.chunk_tokens)
        match = find_prefix(chain, self._tiers, self.settings.min_tokens)
        self._counters.add("hits" if match.chunks else "misses")
        on_disk = [chunk.key for chunk in match.chunks if chunk.tier == "disk"]
        self._learn(*on_disk)
        missing = {*chain.keys, chain.tail_key(len(chain.keys), len(chain.ids) % chain.chunk_tokens)}
        self._unlearn(missing.difference(chunk.key for chunk in match.chunks))
        return match

    def save_from(self, identity: KVIdentity, token_ids: TokenIds) -> int:
        """The first position whose KV `save` would need, a multiple of `chunk_tokens`; from memory, no disk."""
        chain = Chain(identity, token_ids, self.settings.chunk_tokens)
        for number, key in enumerate(chain.keys):
            if not self._is_kept(key):
                return number * self.settings.chunk_tokens
        return len(chain.keys) * self.settings.chunk_tokens

    def keys_of(self, identity: KVIdentity, token_ids: TokenIds) -> list[bytes]:
        """Keys of all chunks that hold this sequence, its earlier tails included: what `forget` needs."""
        chain = Chain(identity, token_ids, self.settings.chunk_tokens)
        keys = list(chain.keys)
        for number in range(len(chain.keys) + 1):
            rest = len(chain.ids) - number * self.settings.chunk_tokens
            lengths = {length for tier in self._tiers for length in tier.lengths(chain.parent(number))}
            keys += [chain.tail_key(number, length) for length in sorted(lengths) if length <= rest]
        return list(dict.fromkeys(keys))

    # loading

    def load(self, identity: KVIdentity, match: Match, out: KVArray) -> int:
        """As `load_from`; returns only how many tokens were restored."""
        return sum(tokens for tokens, _ in self.load_from(identity, match, out))

    def load_from(self, identity: KVIdentity, match: Match, out: KVArray) -> list[tuple[int, TierName]]:
        """Restores the chunks of `match` into `out[..., :tokens, :]`; for each the tokens, and the tier it came from.

        That may be another one than was matched: chunks move meanwhile. `out` is `[layers, 2, kv_heads, at least
        match.tokens, head_dim]` of the identity's dtype. Beyond the tokens returned it holds anything. `identity` must
        be the one that was matched, else nothing is restored.
        """
        _check(identity, out, match.tokens, "out")
        started = time.perf_counter()
        restored: list[tuple[ChunkRef, TierName]] = []
        for chunk, source in zip(match.chunks, self._restore(identity, match.chunks, out), strict=False):
            if source is None:
                break
            restored.append((chunk, source))
        if restored:
            self._account(identity, restored, time.perf_counter() - started)
            self._promote(identity, restored, out)
        return [(chunk.tokens, source) for chunk, source in restored]

    def _restore(self, identity: KVIdentity, chunks: Sequence[ChunkRef], out: KVArray) -> Iterable[TierName | None]:
        """For each chunk in order the tier that it came from, or None where it did not come."""
        digest = identity.digest()

        def restore(chunk: ChunkRef) -> TierName | None:
            return self._restore_one(identity, digest, chunk, _part(out, chunk))

        if self._closed:
            return []
        if len(chunks) == 1 or self.settings.load_threads == 1 or all(chunk.tier == "ram" for chunk in chunks):
            return map(restore, chunks)  # lazily: nothing after a bad chunk is read
        return list(self._pool.map(restore, chunks))

    def _restore_one(self, identity: KVIdentity, digest: bytes, chunk: ChunkRef, out: KVArray) -> TierName | None:
        held = self._ram.get(chunk.key) or (self._writer.get(chunk.key) if self._writer else None)
        if held is not None and held.identity == digest and held.ids[: chunk.tokens].tobytes() == chunk.ids:
            out[...] = held.kv[:, :, :, : chunk.tokens]
            return "ram"
        if self._disk is not None and self._disk.read(chunk, identity, out):
            return "disk"
        self._unlearn([chunk.key])
        return None

    def _account(self, identity: KVIdentity, restored: list[tuple[ChunkRef, TierName]], seconds: float) -> None:
        tokens = {"ram": 0, "disk": 0}
        moved = {"ram": 0, "disk": 0}
        for chunk, source in restored:
            tokens[source] += chunk.tokens
            moved[source] += chunk.size
        self._counters.add("ram_tokens", tokens["ram"])
        self._counters.add("disk_tokens", tokens["disk"])
        if not tokens["ram"]:
            self.cost.observe_load(moved["disk"], seconds, "disk")
        elif not tokens["disk"]:
            self.cost.observe_load(moved["ram"], seconds, "ram")
        self._use([chunk.key for chunk, _ in restored], time.time(), hits=1)

    def _promote(self, identity: KVIdentity, restored: list[tuple[ChunkRef, TierName]], out: KVArray) -> None:
        """Takes chunks into RAM that come from disk for the second time: after the first, the engine has them."""
        stamp = time.time()
        for chunk, source in restored:
            if source == "disk" and chunk.whole and chunk.hits > 0 and self.settings.ram_bytes:
                data = _chunk(
                    identity, identity.digest(), chunk.parent, chunk.start, chunk.ids, _part(out, chunk), stamp
                )
                if not self._ram.put(data):
                    return

    # saving

    def save(self, identity: KVIdentity, token_ids: TokenIds, kv: KVArray, start: int = 0) -> None:
        """Takes in the KV of `token_ids`: what is not stored yet is copied to RAM and queued for the disk.

        `kv` is `[layers, 2, kv_heads, len(token_ids) - start, head_dim]`: the tokens from `start` on, a multiple of
        `chunk_tokens`. Any strides; it may be overwritten once this returns. A tail below `min_tokens` is left out.
        """
        size = self.settings.chunk_tokens
        if start % size or not 0 <= start <= len(token_ids):
            raise ValueError(f"start {start} must be a multiple of {size} within the {len(token_ids)} tokens")
        _check(identity, kv, len(token_ids) - start, "kv", exact=True)
        if self._closed:
            return
        chain = Chain(identity, token_ids, size)
        stamp = time.time()
        keys = list(chain.keys)
        tail = len(chain.ids) - len(keys) * size
        if tail >= self.settings.min_tokens:
            keys.append(chain.tail_key(len(keys), tail))
        self._use(keys, stamp, hits=0)
        for number in range(start // size, len(keys)):
            self._keep(identity, chain, number, keys[number], kv, start, stamp)
        self._ram.touch(keys, stamp)

    def _keep(
        self, identity: KVIdentity, chain: Chain, number: int, key: bytes, kv: KVArray, start: int, stamp: float
    ) -> None:
        """Takes in one chunk of a sequence, if it is not kept already."""
        if self._is_kept(key):
            return
        chunk = self._ram.get(key)
        if chunk is None:
            position = number * self.settings.chunk_tokens
            ids = chain.ids[position : position + self.settings.chunk_tokens]
            tokens = len(ids)
            part = kv[:, :, :, position - start : position - start + tokens]
            chunk = _chunk(identity, chain.root, chain.parent(number), position, ids.tobytes(), part, stamp)
            self._counters.add("saved_tokens", tokens)
            if self._ram.put(chunk):
                shorter = [length for length in self._ram.lengths(chunk.parent) if length < tokens]
                self._ram.supersede(chain.tail_key(number, length) for length in shorter)
        if self._writer is not None and not self._writer.submit(chunk):
            self._counters.add("dropped")

    def _use(self, keys: Sequence[bytes], stamp: float, hits: int) -> None:
        """Notes that a chain was used, so that it stays; before new chunks ask for room, and with one time for all."""
        self._ram.touch(keys, stamp)
        if self._writer is not None:
            self._writer.use(keys, stamp, hits)

    def _is_kept(self, key: bytes) -> bool:
        """Whether the chunk is where it should end up: on disk or on its way there; in RAM without a disk tier."""
        if self._writer is None:
            return self._ram.get(key) is not None
        return key in self._known or self._writer.get(key) is not None

    def _learn(self, *keys: bytes) -> None:
        with self._known_lock:
            for key in keys:
                self._known[key] = None
            while len(self._known) > KNOWN_KEYS:
                del self._known[next(iter(self._known))]

    def _unlearn(self, keys: Iterable[bytes]) -> None:
        with self._known_lock:
            for key in keys:
                self._known.pop(key, None)

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
        self._pool.shutdown()
        if self._disk is not None:
            self._disk.close()
        self._ram.clear()

    def forget(self, keys: Iterable[bytes]) -> int:
        """Deletes chunks from every tier; returns how many were on disk (in RAM, without a disk tier).

        Raises `OSError` or `sqlite3.Error` when the disk keeps them: a deletion must not fail unseen.
        Another process that has the folder open may hold copies in its RAM.
        """
        removed = self._forget(set(keys))
        return removed.disk if self._disk else removed.ram

    def forget_tokens(self, doomed: Sequence[Doomed]) -> Forgotten:
        """Deletes every chunk that holds these sequences, whatever version or tenant computed it, from every tier of
        this process and of the folder; `keys_holding` says which. Refused files cannot be told apart: all of them go.

        Raises as `forget` does. What is saved while this runs may stay.
        """
        chunks = self._ram.held()
        if self._writer is not None:
            chunks += self._writer.held()
        if self._disk is not None:
            chunks += self._disk.held()  # after the writer's: a chunk that moves meanwhile is seen at least once
        removed = self._forget(keys_holding(chunks, doomed))
        return replace(removed, quarantined=self._disk.empty_quarantine() if self._disk else 0)

    def _forget(self, keys: set[bytes]) -> Forgotten:
        waiting = self._writer.cancel(keys) if self._writer is not None else 0
        self._unlearn(keys)  # afterwards: what was being written is known by now
        ram = self._ram.forget(keys)
        return Forgotten(ram=ram, waiting=waiting, disk=self._disk.forget(keys) if self._disk else 0)

    def clear(self) -> None:
        """Deletes everything. Raises as `forget` does."""
        if self._writer is not None:
            self._writer.cancel()
        self._ram.clear()
        if self._disk is not None:
            self._disk.clear()
        with self._known_lock:
            self._known.clear()

    def stats(self) -> KVStats:
        """Sizes of the tiers and counts of this process."""
        count = self._counters.get
        return KVStats(
            ram=self._ram.stats(),
            disk=self._disk.stats() if self._disk else TierStats(0, 0, 0, 0),
            hits=count("hits"),
            misses=count("misses"),
            saved_tokens=count("saved_tokens"),
            restored_tokens=count("ram_tokens") + count("disk_tokens"),
            ram_tokens=count("ram_tokens"),
            disk_tokens=count("disk_tokens"),
            quarantined=count("quarantined"),
            lost=count("lost"),
            read_errors=count("read_errors"),
            write_errors=count("write_errors"),
            index_errors=count("index_errors"),
            index_rebuilds=count("index_rebuilds"),
            dropped=count("dropped"),
            evictions=count("evictions") + self._ram.evictions,
            waiting_bytes=self._writer.waiting_bytes if self._writer else 0,
            disk_trouble=self._disk.trouble if self._disk else "",
        )


def _chunk(
    identity: KVIdentity, digest: bytes, parent: bytes, start: int, ids: bytes, kv: KVArray, stamp: float
) -> ChunkData:
    """A chunk with a copy of `kv` of its own."""
    copy = np.array(kv, order="C", copy=True)
    copy.flags.writeable = False
    packed = np.frombuffer(ids, "<u4")
    key = key_of(parent, packed, digest)
    return ChunkData(key, parent, digest, start, packed, identity.kv_dtype, copy, stamp)


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
