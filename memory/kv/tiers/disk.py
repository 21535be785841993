"""The disk tier: chunk files within a byte budget, found through the index.

Invariants:
- The budget holds for all processes on the folder together, and from the moment the tier is opened.
- A row is entered before its file appears and struck out after its file is gone: the bytes counted are never too few.
- What fails here costs the chunk, never the caller: methods on the serving path and the writer's raise nothing the
  disk does; they answer with nothing and count it.
- Nothing is written on behalf of an owner that was forgotten: that is looked up under the folder's lock.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from memory.kv.chunk import (
    BadChunk,
    Buffer,
    ChunkHeader,
    NoKey,
    verify_chunk,
)
from memory.kv.codec.base import CodecError, Kept, KVArray
from memory.kv.codec.factory import Codecs
from memory.kv.counters import Counters, Event
from memory.kv.fidelity import Fidelity, FidelityRecords, at_least, worse
from memory.kv.forget import Forgotten
from memory.kv.identity import KVIdentity, key_of
from memory.kv.keyring import KeyringError, OwnerForgotten, OwnerKey
from memory.kv.loading import Place
from memory.kv.match import ChunkRef
from memory.kv.settings import KVSettings
from memory.kv.tiers.base import ChunkData, Holding, Stored, TierStats
from memory.kv.tiers.encoding import encode, encode_again, encoder_for, payload_of
from memory.kv.tiers.folder import ChunkFolder
from memory.kv.tiers.index import Index, is_damage
from memory.kv.tiers.keys import FolderKeys
from memory.kv.tiers.lock import folder_lock
from memory.kv.tiers.opening import discard_index, index_in_memory, open_index, refuse, settle
from memory.kv.tiers.reader import ChunkReader, Gone, ReadAhead
from memory.kv.tiers.rebuild import row_of
from memory.kv.tiers.remote import Deleted
from memory.kv.tiers.room import Room, open_remote
from memory.kv.tiers.trouble import Trouble

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
REFUSED_KEYS = 1 << 16
RETURNING_BYTES = 1 << 28


class DiskTier:
    """Thread-safe and safe for many processes on one folder. Close it."""

    def __init__(
        self,
        settings: KVSettings,
        folder: Path,
        codecs: Codecs,
        records: FidelityRecords,
        counters: Counters,
        evicted: Callable[[Iterable[bytes]], None],
    ) -> None:
        """Opens the folder, and makes index, files and budget agree. `evicted` is told the keys of chunks that left.

        Raises `KeyringError` for a master key that cannot be used as it is.
        """
        self.folder = ChunkFolder(folder, settings.quarantine_bytes)
        self.keys = FolderKeys(settings, self.folder)
        self._settings = settings
        self._codecs = codecs
        self._records = records
        self._reader = ChunkReader(self.folder, codecs)
        self._counters = counters
        self._evicted = evicted
        self._trouble = Trouble("KV memory on disk", settings.retry_seconds)
        self._stall = Trouble("reading KV memory", settings.retry_seconds)
        self._refused: dict[bytes, None] = {}  # files of no use that stay: bad ones, and those without a key here
        self._damaged = False
        self._maintenance = threading.Lock()
        self._returning: dict[bytes, memoryview] = {}
        self.remote = open_remote(settings, folder, lambda: self.index, counters)
        self._room = Room(settings, self.folder, self.remote, counters, evicted)
        self.index = self._open()

    # opening and mending

    def _open(self) -> Index:
        """The folder's index, made to agree with its files; as it is, or in memory, where nothing can be written."""
        try:
            self.folder.prepare()
            self.keys.open()
            with self.exclusive():
                return self._open_index()
        except (OSError, sqlite3.Error) as error:
            self._counters.add("write_errors")
            self._trouble.failed(error)
        try:
            return Index(self.folder.index)  # another process holds the lock: its index can be read
        except (OSError, sqlite3.Error):
            return index_in_memory(self.folder, self._counters)

    def _open_index(self) -> Index:
        index = open_index(self.folder, self._counters)
        try:
            self._room.keep_to_budget(index)
        except BaseException:
            index.close()
            raise
        return index

    def maintain(self) -> None:
        """Replaces an index that is damaged, was deleted, or is only in memory. Called off the serving path."""
        with self._maintenance:
            if not self._damaged and self.index.is_current():
                return
            self.folder.prepare()
            self.keys.open()
            with self.exclusive():
                if self._damaged and self.index.is_current():
                    self.index.close()
                    discard_index(self.folder, self._counters, "found while reading")
                fresh = self._open_index()
            self.index.close()
            self.index, self._damaged = fresh, False

    def close(self) -> None:
        """Closes the index and the keyring. Lookups find nothing afterwards."""
        self.index.close()
        self.keys.close()
        if self.remote is not None:
            self.remote.close()

    # the serving path

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        """See `Lookup.find`."""
        found: dict[bytes, Stored] = self._ask(lambda: self.index.find(keys), {})
        return {key: stored for key, stored in found.items() if self._can_be_had(stored)}

    def lengths(self, parent: bytes) -> list[int]:
        """See `Lookup.lengths`."""
        return self._ask(lambda: self.index.lengths(parent), [])

    def siblings(self, parent: bytes, limit: int) -> list[Stored]:
        """See `Lookup.siblings`."""
        found: list[Stored] = self._ask(lambda: self.index.siblings(parent, limit), [])
        return [stored for stored in found if self._can_be_had(stored)]

    def _can_be_had(self, stored: Stored) -> bool:
        """Whether it is worth asking for: what a remote in trouble holds is computed, and stored here, again."""
        away = stored.tier == "remote" and (self.remote is None or not self.remote.available)
        return stored.key not in self._refused and not away

    def read_ahead(self, refs: Sequence[ChunkRef]) -> ReadAhead:
        """What has the kernel read these chunks before they are read in this order."""
        return ReadAhead(self.folder, refs if len(refs) > 1 else ())

    def came(self, *, stalled: bool) -> None:
        """Is told after each load whether the disk hung; then it is left alone for a while."""
        if stalled:
            self._counters.add("read_errors")
            self._stall.failed(TimeoutError("no chunk came in time"))
        else:
            self._stall.recovered()

    def read(self, ref: ChunkRef, identity: KVIdentity, least: Fidelity, out: KVArray, place: Place) -> Fidelity | None:
        """Writes the tokens of `ref` into `out`, `[layers, 2, kv_heads, ref.tokens, head_dim]`; returns how exact.

        None where the chunk is gone, unreadable or bad; a bad one is quarantined. `out` then holds anything.
        """

        def key_of_owner(owner: bytes) -> OwnerKey | None:
            return self.keys.to_read(owner, identity.tenant_secret)

        data: memoryview | None = None
        try:
            data = self._fetch(ref) if ref.tier == "remote" else None
            return self._reader.restore(ref, identity, least, out, key_of_owner, place, data)
        except FileNotFoundError:
            self._counters.add("lost")  # evicted or moved meanwhile, by this process or another
            self._strike(ref.key)
        except OSError as error:
            self._counters.add("read_errors")
            logger.warning("a chunk of KV memory cannot be read: %s", error)
        except NoKey:
            self._counters.add("locked")
            self._refuse(ref.key)
        except Gone:
            self._counters.add("lost")
        except (BadChunk, CodecError) as error:
            if data is None:
                self.discard(ref.key, error)
            else:
                self._discard_object(ref.key, error)
        return None

    def _fetch(self, ref: ChunkRef) -> memoryview | None:
        """A chunk's file from the remote tier; one that is used again is kept, to be written to the disk."""
        data = self.remote.fetch(ref.key) if self.remote is not None else None
        if data is None:
            return None
        view = memoryview(data)
        if ref.hits > 0 and sum(map(len, self._returning.values())) < RETURNING_BYTES:
            self._returning[ref.key] = view
        return view

    def give_up(self, refs: Sequence[ChunkRef]) -> None:
        """Is told what a load left out. Where the first is locked, so are most likely the others of its owner: none of
        them is offered again, and the next save writes all of them anew, instead of one each time."""
        if refs and refs[0].key in self._refused:
            for ref in refs:
                if ref.owner == refs[0].owner:
                    self._refuse(ref.key)

    def discard(self, key: bytes, reason: Exception) -> None:
        """Puts a bad file aside, or deletes one of an earlier format, and strikes it out."""
        if not refuse(self.folder, self._counters, key, reason):
            self._refuse(key)
        self._strike(key)

    def _discard_object(self, key: bytes, reason: Exception) -> None:
        """Deletes a bad object, so that it is not found there again."""
        self._counters.add("quarantined")
        logger.warning("refused chunk %s of KV memory in the remote tier: %s", key.hex()[:16], reason)
        self._returning.pop(key, None)
        if self.remote is not None:
            remote = self.remote
            self._ask(lambda: remote.forget([key]), Deleted())

    def _strike(self, key: bytes) -> None:
        """Strikes out a chunk that has no file here. Where somebody is writing, that may be this very file: then the
        row stays, and the next who misses the file strikes it out."""
        try:
            with folder_lock(self.folder.root / "lock", 0.0):
                if not self.folder.path(key).exists():
                    self._ask(lambda: self.index.remove([key], "disk"), 0)
        except OSError as error:
            logger.info("a chunk of KV memory stays in the index: %s", error)

    def _refuse(self, key: bytes) -> None:
        while len(self._refused) >= REFUSED_KEYS:
            self._refused.pop(next(iter(self._refused)), None)
        self._refused[key] = None

    def _ask(self, question: Callable[[], Answer], nothing: Answer) -> Answer:
        """The index's answer, or `nothing` where it has none; a damaged one is mended later, off this path."""
        if self._stall.blocks():
            return nothing
        try:
            return question()
        except sqlite3.Error as error:
            self._counters.add("index_errors")
            self._damaged = self._damaged or is_damage(error)
            return nothing

    # the writer's path

    def write(self, chunk: ChunkData) -> bool:
        """Stores the chunk durably; False where that failed or where there is no room for it.

        Raises `OwnerForgotten`, and nothing else.
        """
        if self._trouble.blocks():
            self._counters.add("dropped")
            return False
        try:
            self.maintain()
            stored = self._has(chunk) or self._write(chunk)
        except (OSError, sqlite3.Error, KeyringError) as error:
            self._counters.add("write_errors")
            self._damaged = self._damaged or (isinstance(error, sqlite3.Error) and is_damage(error))
            self._trouble.failed(error)
            return False
        self._trouble.recovered()
        return stored

    def _has(self, chunk: ChunkData) -> bool:
        """Whether the chunk is there, as good as it would be now."""
        stored = self.index.find([chunk.key]).get(chunk.key)
        if stored is None or not self._can_be_had(stored):
            return False
        return at_least(stored.fidelity, worse(chunk.fidelity, self._settings.codec))

    def _write(self, chunk: ChunkData) -> bool:
        codec = encoder_for(self._codecs, self._settings.codec, chunk.model, chunk.band)
        payload = payload_of(chunk, codec)
        key = self.keys.to_write(chunk.owner, chunk.tenant_secret)
        self._records.learn(chunk.model, chunk.weights_id)
        header, data = encode(chunk, codec, payload, key, self.keys.nonce())
        with self.exclusive():
            if self.keys.is_destroyed(chunk.owner):
                raise OwnerForgotten
            parent = chunk.parent if chunk.start else None
            if not self._room.make(self.index, chunk.key, parent, len(data), chunk.stamp):
                self._counters.add("dropped")
                return False
            self._put(header, chunk.prefix, data, chunk.stamp)
            self.index.supersede(
                key_of(chunk.parent, chunk.ids[:length], chunk.identity)
                for length in self.index.lengths(chunk.parent)
                if length < header.tokens
            )
        return True

    def _put(self, header: ChunkHeader, prefix: bytes, data: Buffer, stamp: float) -> None:
        """Writes a chunk's file, in the place of an older one, and its row. Hold the folder's lock."""
        before = self.index.rows([header.key]).get(header.key)
        if before is not None and before.state == "writing":
            self.folder.clean(header.key)  # its writer was killed
        self.index.enter(replace(row_of(header, prefix, len(data)), last_used=stamp))
        try:
            self.folder.write(header.key, data)
        except OSError:
            if before is None:
                self.index.remove([header.key])
            else:
                self.index.add([before])
            raise
        self.index.stored(header.key)
        self._refused.pop(header.key, None)
        if before is not None and before.tier == "remote" and self.remote is not None:
            self.remote.forget([header.key])

    def touch(self, uses: Iterable[tuple[bytes, float, int]]) -> None:
        """Records uses of chunks: key, time, hits. Those that another process evicted are noticed by it."""
        missing: list[bytes] = self._ask(lambda: self.index.touch(uses), [])
        self._evicted(missing)
        while self._returning:
            self._bring_back(*self._returning.popitem())

    def _bring_back(self, key: bytes, data: memoryview) -> None:
        """Puts a chunk that came from the remote tier on the disk again, where there is room."""
        try:
            header, prefix = verify_chunk(data)
            with self.exclusive():
                row = self.index.rows([key]).get(key)
                if row is None or row.tier != "remote" or header.key != key or self.keys.is_destroyed(row.owner):
                    return
                parent = header.parent if header.start else None
                if self._room.make(self.index, key, parent, len(data), row.last_used):
                    self._put(header, prefix, data, row.last_used)
        except (OSError, sqlite3.Error, BadChunk) as error:
            self._counters.add("write_errors")
            logger.warning("a chunk of KV memory stays remote: %s", error)

    def exclusive(self) -> AbstractContextManager[None]:
        """The folder's lock, over processes and threads. Raises `OSError` where another keeps it for too long."""
        return folder_lock(self.folder.root / "lock", self._settings.lock_seconds)

    # upkeep: these raise what the disk does, `OSError` and `sqlite3.Error`

    def settle(self) -> None:
        """Clears up what writers that were killed left, while others had the folder open."""
        with self.exclusive():
            settle(self.index, self.folder, self._counters)

    def rewrite(self, key: bytes, codec_name: str, kept: Kept) -> int | None:
        """Writes a chunk again by another codec, in its place; returns the bytes saved.

        None where the chunk is gone, bad, locked, not codable or would not become smaller. Its last use stays.
        """
        try:
            whole = self._reader.load(key, self.keys.for_upkeep)
        except (FileNotFoundError, NoKey, Gone):
            return None
        except (BadChunk, CodecError) as error:
            self.discard(key, error)
            return None
        old = whole.header
        codec = self._codecs.encoder(codec_name, old.model)
        if codec is None:
            return None
        owner_key = self.keys.for_upkeep(old.owner) if old.encrypted else None
        made = encode_again(whole, codec, kept, owner_key, self.keys.nonce())
        if made is None:
            return None
        new, data = made
        with self.exclusive():
            row = self.index.rows([key]).get(key)
            if row is None or row.state != "stored" or self._changed(old) or self.keys.is_destroyed(old.owner):
                return None
            self._put(new, whole.prefix, data, row.last_used)
        self._evicted([key])  # a save may bring it back better
        return old.file_bytes - new.file_bytes

    def _changed(self, header: ChunkHeader) -> bool:
        """Whether the file is another one than it was when this header was read."""
        try:
            now, _ = self.folder.read_head(header.key)
        except (FileNotFoundError, BadChunk):
            return True
        return (now.codec, now.created, now.nonce) != (header.codec, header.created, header.nonce)

    def verify(self, key: bytes) -> bool:
        """Proves a chunk's file by its checksum. A bad one is put aside, one that is gone struck out."""
        try:
            self._reader.verify(key)
        except FileNotFoundError:
            self._strike(key)
            return False
        except BadChunk as error:
            self.discard(key, error)
            return False
        return True

    def children_tokens(self, key: bytes) -> int:
        """Tokens of the longest chunk that follows this one; 0 without."""
        return self.index.longest_child(key)

    def drop(self, keys: Iterable[bytes], why: Event = "expired") -> int:
        """Deletes chunks, in whatever tier, and counts why; returns how many there were."""
        wanted = list(set(keys))
        with self.exclusive():
            remote = self._remote_keys(wanted)
            for key in wanted:
                self.folder.delete(key)
            if self.remote is not None:
                self.remote.forget(remote)
            removed = len(remote) + self.index.remove(wanted)
        self._evicted(wanted)
        self._counters.add(why, removed)
        return removed

    def _remote_keys(self, keys: list[bytes]) -> list[bytes]:
        return [key for key, row in self.index.rows(keys).items() if row.tier == "remote"]

    def forget(self, owners: Sequence[bytes], so_far: Forgotten) -> Forgotten:
        """Deletes the bytes of these owners, refused files included; adds to `so_far` what that removed."""
        self.maintain()
        with self.exclusive():
            settle(self.index, self.folder, self._counters)  # half-written files are bytes of somebody as well
            keys = [key for owner in owners for key in self.index.by_owner(owner)]
            for key in keys:
                self.folder.delete(key)
            refused = self.folder.forget_refused(owners)
            self.folder.sync(keys)
            remote = self._remote_keys(keys)
            deleted = self.remote.forget(remote) if self.remote is not None else Deleted(0, len(remote))
            removed = self.index.remove(keys)
            self.index.scrub()
        self._evicted(keys)
        return replace(so_far, disk=removed, remote=deleted.gone, remote_waiting=deleted.waiting, quarantined=refused)

    def clear(self) -> None:
        """Deletes all chunks; keys and what was forgotten stay."""
        with self.exclusive():
            self.folder.clear()
            self.index.remove(self.index.keys())
            if self.remote is not None:
                self.remote.clear()

    def stats(self) -> TierStats:
        """How full the tier is, all processes together."""
        chunks, tokens, size = self._ask(self.index.totals, (0, 0, 0))
        return TierStats(chunks, tokens, size, self._settings.disk_bytes)

    def remote_stats(self) -> TierStats:
        """How full the remote tier is."""
        return self.remote.stats() if self.remote is not None else TierStats(0, 0, 0, 0)

    def report(self) -> list[Holding]:
        """What is stored, by model, band, codec and fidelity. Reads the whole index."""
        return self._ask(self.index.holdings, [])

    @property
    def trouble(self) -> str:
        """Why nothing is written or read at the moment; empty while all is well."""
        return self._trouble.reason or self._stall.reason
