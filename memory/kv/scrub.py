"""The scrubber: proves chunk files in the background, before someone needs them, and makes folder and index agree.

Invariants:
- It walks in the order of keys, which is the order of the folders. Where it is lies in the index: a restart goes on
  from there, a new index begins anew.
- It reads no more bytes than it is given. A file is proven by its checksum, for which no key is needed.
- A file without a row is entered only when it is whole, its owner was not forgotten, and the budget has room; else it
  is deleted, or put aside where it is bad. A row without a file is struck out.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memory.kv.chunk import BadChunk, verify_chunk
from memory.kv.counters import Counters
from memory.kv.identity import DIGEST_BYTES
from memory.kv.tiers.disk import DiskTier
from memory.kv.tiers.index import Place
from memory.kv.tiers.rebuild import list_shard, read_row

logger = logging.getLogger(__name__)
CURSOR, BEGUN, BOOT = "scrub cursor", "scrub begun", "scrub boot"
PASS_SECONDS = 86_400.0
"""From the beginning of one pass over all files to that of the next, at least."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SHARDS = 256
BATCH = 64


@dataclass(slots=True)
class Scrubbed:
    """What a scrubber of this process has done."""

    files: int = 0
    bytes: int = 0
    bad: int = 0
    """Files that were put aside, and rows whose file was gone."""
    orphans: int = 0
    """Files that the index did not list and lists now."""
    passes: int = 0
    """How often it came to the end."""


class Scrubber:
    """For one thread. `stopped` is asked between files. Methods raise `OSError` and `sqlite3.Error`."""

    def __init__(
        self,
        disk: DiskTier,
        counters: Counters,
        budget: int,
        stopped: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`budget`: bytes that the disk tier may hold."""
        self._disk = disk
        self._counters = counters
        self._budget = budget
        self._stopped = stopped
        self._clock = clock
        self.done = Scrubbed()

    def step(self, size: int) -> int:
        """Proves files until `size` bytes were read or the pass has ended; returns the bytes read.

        Does nothing until it is time for the next pass.
        """
        at, read = self._disk.index.fact(CURSOR) or b"", 0
        if not at and not self._begin():
            return 0
        while read < size and not self._stopped():
            shard = at[0] if at else 0
            if len(at) < DIGEST_BYTES:
                self.agree(shard)
            found = [place for place in self._disk.index.places_after(at, BATCH) if place.key[0] == shard]
            for place in found:
                at = place.key
                read += self._prove(place) if place.tier == "disk" else 0
                if read >= size or self._stopped():
                    break
            if not found:
                at = bytes([shard + 1]) if shard + 1 < SHARDS else b""
            if not at:
                self.done.passes += 1
                break
        self._disk.index.note(CURSOR, at)
        return read

    def _begin(self) -> bool:
        """Whether a pass begins now."""
        begun = float(self._disk.index.fact(BEGUN) or 0)
        if begun <= self._clock() < begun + PASS_SECONDS:
            return False
        self._disk.index.note(BEGUN, b"%d" % self._clock())
        return True

    def after_boot(self) -> None:
        """Makes folder and index agree without reading files, once after the machine was started.

        A power cut may have taken the last rows from the index, whose files are there: they would not be counted.
        """
        try:
            boot = BOOT_ID.read_bytes()
        except OSError:
            return  # not a Linux: the walk finds them later
        if self._disk.index.fact(BOOT) == boot:
            return
        for shard in range(SHARDS):
            if self._stopped():
                return
            self.agree(shard)
        self._disk.index.note(BOOT, boot)

    def agree(self, shard: int) -> None:
        """Makes the index list the files of one folder, and nothing else in their range of keys."""
        name = f"{shard:02x}"
        folder = self._disk.folder.chunks / name[0] / name[1]
        try:
            files = dict(list_shard(folder))
            leftovers = [entry for entry in os.listdir(folder) if entry.startswith(".") and entry.endswith(".tmp")]
        except FileNotFoundError:
            files, leftovers = {}, []
        first, last = bytes([shard]) + bytes(DIGEST_BYTES - 1), bytes([shard]) + b"\xff" * (DIGEST_BYTES - 1)
        entered = self._disk.index.entered(first, last, "disk")
        for file, key in files.items():
            if key not in entered and not self._stopped():
                self._adopt(folder / file, key)
        for key in entered.difference(files.values()):
            self._strike(key)
        if leftovers:
            with self._disk.exclusive():  # nobody writes now: these belong to writers that were killed
                for leftover in leftovers:
                    (folder / leftover).unlink(missing_ok=True)

    def _prove(self, place: Place) -> int:
        """Reads one file; returns its size."""
        self.done.files += 1
        self.done.bytes += place.size
        try:
            good = self._disk.verify(place.key)
            if good and self._disk.folder.path(place.key).stat().st_size != place.size:
                self._correct(place.key)
        except FileNotFoundError:
            return 0  # evicted meanwhile
        except OSError as error:
            self._counters.add("read_errors")
            logger.warning("a chunk of KV memory cannot be read: %s", error)
            return place.size
        self.done.bad += not good
        return place.size

    def _correct(self, key: bytes) -> None:
        """Enters a file again whose row is of an earlier one: its writer was killed in between."""
        with self._disk.exclusive():
            self._disk.index.add([read_row(self._disk.folder.path(key), key)])

    def _strike(self, key: bytes) -> None:
        """Takes a row without a file out."""
        with self._disk.exclusive():
            if not self._disk.folder.path(key).exists():
                self.done.bad += self._disk.index.remove([key], "disk")

    def _adopt(self, path: Path, key: bytes) -> None:
        """Enters a file that the index does not list, or gets rid of it."""
        with self._disk.exclusive():
            try:
                row = read_row(path, key)
                entered = self._disk.index.rows([key]).get(key)
                if entered is not None and entered.tier == "disk":
                    return  # written meanwhile
                verify_chunk(memoryview(path.read_bytes()))
            except FileNotFoundError:
                return  # evicted meanwhile
            except BadChunk as error:
                self._disk.discard(key, error)
                return
            full = self._disk.index.used_bytes() + row.size > self._budget
            if full or 0 < row.expires <= self._clock() or self._disk.keys.is_destroyed(row.owner):
                path.unlink(missing_ok=True)
                return
            self._disk.index.add([row])
            self.done.orphans += 1
