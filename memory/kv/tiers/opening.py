"""Opening a folder of chunks: its index is taken as it is, settled, or built from the files.

Invariants:
- A whole index is believed: only what killed writers left in the middle of writing is looked at. All files are read
  where there is no index, or a damaged one.
- Afterwards every row has its file, and every file that its writer finished has its row.
"""

from __future__ import annotations

import logging
import sqlite3
import time

from memory.kv.chunk import BadChunk, OldChunk
from memory.kv.counters import Counters
from memory.kv.tiers.folder import ChunkFolder
from memory.kv.tiers.index import Index, IndexMissing, Row, is_damage
from memory.kv.tiers.index_schema import discard
from memory.kv.tiers.rebuild import row_of, scan_rows

logger = logging.getLogger(__name__)


def open_index(folder: ChunkFolder, counters: Counters) -> Index:
    """The folder's index, which agrees with its files. Hold the folder's lock.

    Raises `OSError` and `sqlite3.Error` where that cannot be had.
    """
    try:
        index = Index(folder.index)
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        if not isinstance(error, IndexMissing):
            discard_index(folder, counters, error)
        folder.clean_all()
        return Index.build(folder.index, scan_rows(folder.chunks, _Refuse(folder, counters)))
    try:
        settle(index, folder, counters)
    except BaseException:
        index.close()
        raise
    return index


def index_in_memory(folder: ChunkFolder, counters: Counters) -> Index:
    """An index of the files of a folder that cannot be written to; an empty one where it cannot be read either."""

    def note(_: bytes, error: Exception) -> None:
        if isinstance(error, OSError):
            counters.add("read_errors")

    try:
        return Index.build(None, scan_rows(folder.chunks, note))
    except OSError as error:
        counters.add("read_errors")
        logger.warning("KV memory cannot read %s: %s", folder.root, error)
        return Index(None)


def discard_index(folder: ChunkFolder, counters: Counters, error: sqlite3.Error | str) -> None:
    """Deletes an index that is damaged. Hold the folder's lock."""
    counters.add("index_rebuilds")
    logger.warning("the index of KV memory is damaged (%s); building it from the chunk files", error)
    discard(folder.index)


def settle(index: Index, folder: ChunkFolder, counters: Counters) -> None:
    """Looks at what is entered as being written: a file that is whole is entered, another is no chunk. Corrects times
    that lie ahead. Hold the folder's lock: nobody writes now."""
    refuse = _Refuse(folder, counters)
    index.correct_times(time.time())
    for row in index.writing():
        folder.clean(row.key)
        found = read_row(folder, row.key, refuse)
        if found is None:
            index.remove([row.key])
        else:
            index.add([found])


def read_row(folder: ChunkFolder, key: bytes, refuse: _Refuse) -> Row | None:
    """The row of a chunk's file; None where there is none, or none that is whole."""
    try:
        header, prefix = folder.read_head(key)
        if header.key != key:
            raise BadChunk("the file's name is not its key")
    except FileNotFoundError:
        return None
    except (BadChunk, OSError) as error:
        refuse(key, error)
        return None
    return row_of(header, prefix, header.file_bytes)


class _Refuse:
    """What becomes of a file that gives no row."""

    def __init__(self, folder: ChunkFolder, counters: Counters) -> None:
        self._folder = folder
        self._counters = counters

    def __call__(self, key: bytes, error: Exception) -> None:
        refuse(self._folder, self._counters, key, error)


def refuse(folder: ChunkFolder, counters: Counters, key: bytes, error: Exception) -> bool:
    """Deletes a file of an earlier format, and puts a bad one aside; False where it stays in the way."""
    try:
        if isinstance(error, OldChunk):
            folder.delete(key)
        elif isinstance(error, OSError):
            counters.add("read_errors")
            logger.warning("a chunk of KV memory cannot be read: %s", error)
        else:
            counters.add("quarantined")
            logger.warning("refused chunk %s of KV memory: %s", key.hex()[:16], error)
            folder.quarantine(key)
    except FileNotFoundError:
        return True  # another thread or process was faster
    except OSError as failure:
        logger.warning("a refused chunk cannot be moved away: %s", failure)
        return False
    return True
