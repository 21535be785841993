"""The disk tier: chunk files within a byte budget, found through the index.

Invariants:
- The budget holds for all processes on the folder together, and from the moment the tier is opened.
- The file is there before its row is, and gone before its row is: the bytes counted are never too few.
- What fails here costs the chunk, never the caller: methods on the serving path and the writer's raise nothing the
  disk does; they answer with nothing and count it.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import numpy as np

from memory.kv.chunk import BadChunk, ChunkHeader, pack_chunk
from memory.kv.codec.base import CodecError, KVArray
from memory.kv.codec.factory import codec_named
from memory.kv.counters import Counters
from memory.kv.forget import Held
from memory.kv.identity import KVIdentity, key_of
from memory.kv.match import ChunkRef
from memory.kv.settings import KVSettings
from memory.kv.tiers.base import ChunkData, Stored, TierStats
from memory.kv.tiers.folder import ChunkFolder
from memory.kv.tiers.index import Index, Row, is_damage
from memory.kv.tiers.lock import folder_lock
from memory.kv.tiers.trouble import Trouble

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
EVICTION_BATCH = 64
INDEX_NAME = "index.db"


class DiskTier:
    """Thread-safe and safe for many processes on one folder. Close it."""

    def __init__(
        self,
        settings: KVSettings,
        folder: Path,
        counters: Counters,
        evicted: Callable[[Iterable[bytes]], None],
    ) -> None:
        """Opens the folder, and makes index, files and budget agree. `evicted` is told the keys of chunks that left."""
        self._settings = settings
        self._codec = codec_named(settings.codec)
        self._folder = ChunkFolder(folder, settings.quarantine_bytes)
        self._counters = counters
        self._evicted = evicted
        self._trouble = Trouble("KV memory on disk", settings.retry_seconds)
        self._refused: set[bytes] = set()  # bad files that could not be moved away
        self._damaged = False
        self._maintenance = threading.Lock()
        self._index = self._open()

    # opening and mending

    def _open(self) -> Index:
        """The folder's index, made to agree with its files; one in memory where the folder cannot be written to."""
        try:
            self._folder.prepare()
            with self._exclusive():
                return self._open_index()
        except (OSError, sqlite3.Error) as error:
            self._counters.add("write_errors")
            self._trouble.failed(error)
        index = Index(None)
        try:
            self._agree(index, may_write=False)
        except OSError as error:
            self._counters.add("read_errors")
            logger.warning("KV memory cannot read %s: %s", self._folder.root, error)
        return index

    def _open_index(self) -> Index:
        path = self._folder.root / INDEX_NAME
        try:
            index = Index(path)
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            self._discard_index(error)
            index = Index(path)
        try:
            self._agree(index, may_write=True)
        except BaseException:
            index.close()
            raise
        return index

    def _discard_index(self, error: sqlite3.Error | str) -> None:
        self._counters.add("index_rebuilds")
        logger.warning("the index of KV memory is damaged (%s); rebuilding it from the chunk files", error)
        for suffix in ("", "-wal", "-shm"):
            (self._folder.root / f"{INDEX_NAME}{suffix}").unlink(missing_ok=True)

    def _agree(self, index: Index, *, may_write: bool) -> None:
        """Makes the index list exactly the files that are there, within the budget."""
        entered = index.keys()
        rows: list[Row] = []
        for entry in self._folder.scan(clean=may_write):
            if entered.pop(entry.key, None) == entry.size:
                continue
            try:
                header, ids = self._folder.describe(entry)
            except OSError as error:
                self._counters.add("read_errors")
                logger.warning("a chunk of KV memory cannot be read: %s", error)
                continue
            except BadChunk as error:
                index.remove([entry.key])
                if may_write:
                    self._quarantine(entry.key, error)
                continue
            rows.append(
                Row(
                    key=header.key,
                    parent=header.parent,
                    start=header.start,
                    tokens=header.tokens,
                    ids=ids.tobytes(),
                    size=entry.size,
                    codec=header.codec,
                    last_used=entry.modified,
                )
            )
        index.remove(entered)
        index.add(rows)
        if may_write:
            self._evict(index, index.used_bytes() - self._settings.disk_bytes, used_before=None)

    def maintain(self) -> None:
        """Replaces an index that is damaged, was deleted, or is only in memory. Called off the serving path."""
        with self._maintenance:
            if not self._damaged and self._index.is_current():
                return
            self._folder.prepare()
            with self._exclusive():
                if self._damaged and self._index.is_current():
                    self._index.close()
                    self._discard_index("found while reading")
                fresh = self._open_index()
            self._index.close()
            self._index, self._damaged = fresh, False

    def close(self) -> None:
        """Closes the index. Lookups find nothing afterwards."""
        self._index.close()

    # the serving path

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        """See `Lookup.find`."""
        found: dict[bytes, Stored] = self._ask(lambda: self._index.find(keys), {})
        return {key: stored for key, stored in found.items() if key not in self._refused}

    def lengths(self, parent: bytes) -> list[int]:
        """See `Lookup.lengths`."""
        return self._ask(lambda: self._index.lengths(parent), [])

    def siblings(self, parent: bytes, limit: int) -> list[Stored]:
        """See `Lookup.siblings`."""
        found: list[Stored] = self._ask(lambda: self._index.siblings(parent, limit), [])
        return [stored for stored in found if stored.key not in self._refused]

    def read(self, ref: ChunkRef, identity: KVIdentity, out: KVArray) -> bool:
        """Writes the tokens of `ref` into `out`, `[layers, 2, kv_heads, ref.tokens, head_dim]`.

        False where the chunk is gone, unreadable or bad; a bad one is quarantined. `out` then holds anything.
        """
        try:
            self._read(ref, identity, out)
        except FileNotFoundError:
            self._counters.add("lost")  # evicted meanwhile, by this process or another
            self._ask(lambda: self._index.remove([ref.key]), 0)
            return False
        except OSError as error:
            self._counters.add("read_errors")
            logger.warning("a chunk of KV memory cannot be read: %s", error)
            return False
        except (BadChunk, CodecError) as error:
            self._quarantine(ref.key, error)
            self._ask(lambda: self._index.remove([ref.key]), 0)
            return False
        return True

    def _read(self, ref: ChunkRef, identity: KVIdentity, out: KVArray) -> None:
        digest = identity.digest()

        def accept(header: ChunkHeader) -> None:
            if (header.key, header.parent, header.identity) != (ref.key, ref.parent, digest):
                raise BadChunk("the file holds another chunk than its name says")
            if header.dtype != identity.kv_dtype or header.shape != identity.shape(header.tokens):
                raise BadChunk(f"the file holds {header.dtype} {header.shape}, not what the identity says")
            if header.tokens < ref.tokens or header.start != ref.start:
                raise BadChunk("the file holds other tokens than the index says")

        header, ids, payload = self._folder.read(ref.key, accept)
        if ids[: ref.tokens].tobytes() != ref.ids or key_of(ref.parent, ids, digest) != ref.key:
            raise BadChunk("the file holds other tokens than its key says")
        try:
            codec = codec_named(header.codec)
        except ValueError as error:
            raise BadChunk(str(error)) from error
        if header.tokens == ref.tokens:
            codec.decode(payload, out)
        else:
            whole = np.empty(header.shape, out.dtype)
            codec.decode(payload, whole)
            out[...] = whole[:, :, :, : ref.tokens]

    def _quarantine(self, key: bytes, reason: Exception) -> None:
        self._counters.add("quarantined")
        logger.warning("refused chunk %s of KV memory: %s", key.hex()[:16], reason)
        try:
            self._folder.quarantine(key)
        except FileNotFoundError:
            return  # another thread or process was faster
        except OSError as error:
            self._refused.add(key)
            logger.warning("a refused chunk cannot be moved away: %s", error)

    def _ask(self, question: Callable[[], Answer], nothing: Answer) -> Answer:
        """The index's answer, or `nothing` where it has none; a damaged one is mended later, off this path."""
        try:
            return question()
        except sqlite3.Error as error:
            self._counters.add("index_errors")
            self._damaged = self._damaged or is_damage(error)
            return nothing

    # the writer's path

    def write(self, chunk: ChunkData) -> bool:
        """Stores the chunk durably; False where that failed or where there is no room for it."""
        if self._trouble.blocks():
            self._counters.add("dropped")
            return False
        try:
            self.maintain()
            stored = bool(self._index.find([chunk.key])) or self._write(chunk)
        except (OSError, sqlite3.Error) as error:
            self._counters.add("write_errors")
            self._damaged = self._damaged or (isinstance(error, sqlite3.Error) and is_damage(error))
            self._trouble.failed(error)
            return False
        self._trouble.recovered()
        return stored

    def _write(self, chunk: ChunkData) -> bool:
        payload = self._codec.encode(chunk.kv)
        header = ChunkHeader(
            key=chunk.key,
            parent=chunk.parent,
            identity=chunk.identity,
            start=chunk.start,
            shape=chunk.kv.shape,
            dtype=chunk.kv_dtype,
            codec=self._codec.name,
            payload_bytes=len(payload),
        )
        data = pack_chunk(header, chunk.ids, payload)
        with self._exclusive():
            if not self._make_room(len(data), chunk.stamp):
                self._counters.add("dropped")
                return False
            self._folder.write(chunk.key, data)
            self._refused.discard(chunk.key)
            try:
                self._enter(chunk, header, len(data))
            except sqlite3.Error:
                self._folder.delete(chunk.key)
                raise
        return True

    def _enter(self, chunk: ChunkData, header: ChunkHeader, size: int) -> None:
        row = Row(
            key=chunk.key,
            parent=chunk.parent,
            start=chunk.start,
            tokens=header.tokens,
            ids=chunk.ids.tobytes(),
            size=size,
            codec=header.codec,
            last_used=chunk.stamp,
        )
        self._index.add([row])
        self._index.supersede(
            key_of(chunk.parent, chunk.ids[:length], chunk.identity)
            for length in self._index.lengths(chunk.parent)
            if length < header.tokens
        )

    def _make_room(self, needed: int, stamp: float) -> bool:
        used = self._index.used_bytes()
        free = self._folder.free_bytes()
        budget = min(self._settings.disk_bytes, used + free - self._settings.disk_reserve_bytes)
        if needed > self._settings.disk_bytes:
            return False
        if needed > budget:
            raise OSError(errno.ENOSPC, f"{free} bytes free, of which {self._settings.disk_reserve_bytes} are reserved")
        return self._evict(self._index, used + needed - budget, used_before=stamp)

    def _evict(self, index: Index, excess: int, used_before: float | None) -> bool:
        """Deletes the chunks worth least until `excess` bytes are freed.

        False, with nothing deleted, where that would take chunks that were used at `used_before` or later: those
        are the beginning of the sequence that wants the room.
        """
        victims: list[bytes] = []
        limit = EVICTION_BATCH
        while excess > 0:
            candidates = index.least_worth(limit)
            for victim in candidates[len(victims) :]:
                if excess <= 0:
                    break
                if used_before is not None and victim.last_used >= used_before:
                    return False
                victims.append(victim.key)
                excess -= victim.size
            if len(candidates) < limit:
                break
            limit *= 2
        for key in victims:
            self._folder.delete(key)
        index.remove(victims)
        self._evicted(victims)
        self._counters.add("evictions", len(victims))
        return excess <= 0

    def touch(self, uses: Iterable[tuple[bytes, float, int]]) -> None:
        """Records uses of chunks: key, time, hits. Those that another process evicted are noticed by it."""
        missing: list[bytes] = self._ask(lambda: self._index.touch(uses), [])
        self._evicted(missing)

    def _exclusive(self) -> AbstractContextManager[None]:
        return folder_lock(self._folder.root / "lock", self._settings.lock_seconds)

    # upkeep

    def held(self) -> list[Held]:
        """Every chunk of the folder, also one whose writer was killed before it was entered. Raises as `forget`."""
        self.maintain()
        with self._exclusive():
            self._agree(self._index, may_write=True)
            return self._index.held()

    def forget(self, keys: Iterable[bytes]) -> int:
        """Deletes chunks; returns how many there were. Raises `OSError` or `sqlite3.Error`: it must not fail unseen."""
        wanted = list(set(keys))
        with self._exclusive():
            for key in wanted:
                self._folder.forget(key)
            self._folder.sync(wanted)
            removed = self._index.remove(wanted)
            self._index.scrub()
            return removed

    def empty_quarantine(self) -> int:
        """Deletes the refused files, which may hold anybody's words; returns how many. Raises as `forget`."""
        with self._exclusive():
            return self._folder.empty_quarantine()

    def clear(self) -> None:
        """Deletes all chunks. Raises as `forget` does."""
        with self._exclusive():
            self._folder.clear()
            self._index.remove(self._index.keys())

    def stats(self) -> TierStats:
        """How full the tier is, all processes together."""
        chunks, tokens, size = self._ask(self._index.totals, (0, 0, 0))
        return TierStats(chunks, tokens, size, self._settings.disk_bytes)

    @property
    def trouble(self) -> str:
        """Why nothing is written at the moment; empty while all is well."""
        return self._trouble.reason
