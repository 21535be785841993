"""Reading chunk files: proven, decrypted, decoded; for serving into memory of others, for upkeep into an array.

Invariants:
- Nothing is written into `out` before the file, its key, its identity and its token ids were proven.
- What was decrypted lies in memory that the thread reuses, and in no other place.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from memory.kv.chunk import BadChunk, ChunkHeader, Cipher, open_chunk, read_header, verify_chunk
from memory.kv.codec.base import Codec, KVArray
from memory.kv.codec.factory import Codecs
from memory.kv.fidelity import Fidelity, at_least
from memory.kv.identity import KV_DTYPES, Ids, KVIdentity, key_of, prefix_digests
from memory.kv.keyring import OwnerKey
from memory.kv.loading import Place
from memory.kv.match import ChunkRef
from memory.kv.tiers.folder import ChunkFolder

READ_AHEAD_BYTES = 64 << 20
FindKey = Callable[[bytes], OwnerKey | None]
"""The key of an owner id, or None where there is none."""


class Gone(Exception):
    """The file is whole, and not what is wanted any more: it has expired, or moved down the ladder."""


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A chunk read back for rewriting."""

    header: ChunkHeader
    prefix: bytes
    ids: Ids
    kv: KVArray


class ChunkReader:
    """Thread-safe. Methods raise `OSError`, `BadChunk`, `CodecError`, `NoKey` and `Gone`."""

    def __init__(self, folder: ChunkFolder, codecs: Codecs) -> None:
        self._folder = folder
        self._codecs = codecs

    def restore(
        self,
        ref: ChunkRef,
        identity: KVIdentity,
        least: Fidelity,
        out: KVArray,
        find: FindKey,
        place: Place,
        data: memoryview | None = None,
    ) -> Fidelity:
        """Writes the tokens of `ref` into `out`, `[layers, 2, kv_heads, ref.tokens, head_dim]`; returns how exact.

        `data` is the file, where it did not come from the folder. Raises `TakenBack` where `place` was, too.
        """
        digest = identity.digest()

        def accept(header: ChunkHeader) -> None:
            if (header.key, header.parent, header.identity) != (ref.key, ref.parent, digest):
                raise BadChunk("the file holds another chunk than its name says")
            if header.dtype != identity.kv_dtype or header.shape != identity.shape(header.tokens):
                raise BadChunk(f"the file holds {header.dtype} {header.shape}, not what the identity says")
            if header.tokens < ref.tokens or header.start != ref.start:
                raise BadChunk("the file holds other tokens than the index says")

        header, ids, payload = self._open(ref.key, accept, find, data)
        if ids[: ref.tokens].tobytes() != ref.ids or key_of(ref.parent, ids, digest) != ref.key:
            raise BadChunk("the file holds other tokens than its key says")
        if header.expired(time.time()) or not at_least(header.fidelity, least):
            raise Gone
        codec = self._codec(header)
        if header.tokens == ref.tokens:
            with place.writing():
                codec.decode(payload, out, header.start)
        else:
            whole = np.empty(header.shape, out.dtype)
            codec.decode(payload, whole, header.start)
            with place.writing():
                out[...] = whole[:, :, :, : ref.tokens]
        return header.fidelity

    def load(self, key: bytes, find: FindKey) -> Whole:
        """A whole chunk, whatever it is of."""

        def accept(header: ChunkHeader) -> None:
            if header.key != key:
                raise BadChunk("the file holds another chunk than its name says")

        header, ids, payload = self._open(key, accept, find)
        kv = np.empty(header.shape, KV_DTYPES[header.dtype])
        self._codec(header).decode(payload, kv, header.start)
        return Whole(header, prefix_digests(header.parent, ids, header.identity), ids.copy(), kv)

    def verify(self, key: bytes) -> ChunkHeader:
        """Proves a whole file by its checksum; needs no key."""
        header, _ = verify_chunk(self._folder.read(key, lambda _: None))
        if header.key != key:
            raise BadChunk("the file's name is not its key")
        return header

    def _open(
        self, key: bytes, accept: Callable[[ChunkHeader], None], find: FindKey, data: memoryview | None = None
    ) -> tuple[ChunkHeader, Ids, memoryview]:
        cipher: Cipher | None = None

        def accept_and_find(header: ChunkHeader) -> None:
            nonlocal cipher
            accept(header)
            if header.encrypted:  # without its key the file is read all the same: is it locked, or its header bad?
                found = find(header.owner)
                cipher = found.cipher if found is not None and found.id == header.key_id else None

        if data is None:
            data = self._folder.read(key, accept_and_find)
        else:
            accept_and_find(read_header(data, len(data)))
        plain = self._folder.scratch("plain", len(data)) if cipher else data
        return open_chunk(data, cipher, plain)

    def _codec(self, header: ChunkHeader) -> Codec:
        try:
            return self._codecs.named(header.codec)
        except ValueError as error:
            raise BadChunk(str(error)) from error


class ReadAhead:
    """Has the kernel read the files of one load before they are asked for, so many bytes ahead. Thread-safe."""

    def __init__(self, folder: ChunkFolder, chunks: Sequence[ChunkRef]) -> None:
        self._folder = folder
        self._chunks = deque(chunk for chunk in chunks if chunk.tier == "disk")
        self._asked: set[bytes] = set()
        self._lock = threading.Lock()
        self._ahead = 0

    def reach(self, chunk: ChunkRef) -> None:
        """`chunk` is read next."""
        batch: list[bytes] = []
        with self._lock:
            if chunk.key in self._asked:
                self._asked.discard(chunk.key)
                self._ahead -= chunk.size
            while self._chunks and self._ahead < READ_AHEAD_BYTES:
                coming = self._chunks.popleft()
                self._asked.add(coming.key)
                self._ahead += coming.size
                batch.append(coming.key)
        self._folder.advise(batch)
