"""The buffers of running sequences, the byte budget they share, and the memory they are made of.

A sequence reserves room for its longest reply when it is admitted, so a running sequence never waits for memory. Room
is counted in pages. Memory of ended sequences is kept for the next ones up to a limit, and some is committed before
the first: pages that the system hands out one by one cost a restored session more time than decoding its KV.
"""

from __future__ import annotations

import logging
import mmap
import threading
from dataclasses import dataclass, field

import torch

from serve.engine.model import Decoder

log = logging.getLogger(__name__)
PAGE_TOKENS = 64
HUGE_PAGE = 1 << 21
LARGEST_WASTE = 4  # a kept block serves a sequence that needs at least this part of it


class MemoryBlock:
    """Bytes of anonymous memory, in huge pages where the system gives them."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(size, 1))
        if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                log.debug("no huge pages for KV: %s", error)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def size(self) -> int:
        return len(self.bytes)

    def commit(self) -> None:
        """Has the system back all of it now."""
        self.bytes[:: mmap.PAGESIZE] = 0


class BlockPool:
    """Thread-safe. Hands out blocks and takes them back, of which it keeps `keep_bytes` at most."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._free: list[MemoryBlock] = []

    @property
    def kept_bytes(self) -> int:
        """Bytes that wait for the next sequence."""
        with self._lock:
            return sum(block.size for block in self._free)

    def take(self, size: int) -> MemoryBlock:
        """Returns a block of at least `size` bytes that hold anything."""
        with self._lock:
            fitting = [block for block in self._free if size <= block.size]
            best = min(fitting, key=lambda block: block.size, default=None)
            # With much to spare it is committed already, and nobody else needs it now.
            if best is not None and (size * LARGEST_WASTE >= best.size or len(self._free) == 1):
                self._free.remove(best)
                return best
        return MemoryBlock(size)

    def put(self, block: MemoryBlock) -> None:
        """Takes a block back that nobody looks at any more."""
        with self._lock:
            self._free.append(block)
            excess = sum(kept.size for kept in self._free) - self._keep_bytes
            while excess > 0:
                excess -= self._free.pop(0).size

    def warm(self, size: int) -> None:
        """Keeps a committed block of `size` bytes ready, where the limit allows it."""
        if 0 < size <= self._keep_bytes:
            block = MemoryBlock(size)
            block.commit()
            self.put(block)


@dataclass(eq=False)
class Buffer:
    """One sequence's KV [layers, 2, kv_heads, capacity, head_dim], what enters its first layer that is not shared
    (None where that is not kept), and the bytes reserved for both.

    Whoever reads or writes the tensors holds the buffer meanwhile, for its memory is used again once nobody does.
    """

    kv: torch.Tensor
    entering: torch.Tensor | None
    reserved: int
    _block: MemoryBlock
    _pool: BlockPool
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _holders: int = 1

    def hold(self) -> Buffer:
        """Keeps the memory until `let_go` is called once more."""
        with self._lock:
            if not self._holders:
                raise RuntimeError("the buffer's memory was given back already")
            self._holders += 1
        return self

    def let_go(self) -> None:
        """Ends one hold; with the last one the memory goes back."""
        with self._lock:
            self._holders -= 1
            last = not self._holders
        if last:
            self._pool.put(self._block)


class PageBudget:
    """Hands out buffers while their sum stays within `budget_bytes`. Used from the engine's thread only."""

    def __init__(self, decoder: Decoder, budget_bytes: int, keep_bytes: int = 0) -> None:
        self._decoder = decoder
        self._pool = BlockPool(min(keep_bytes, budget_bytes))
        self.budget = budget_bytes
        self.used = 0

    def warm(self, tokens: int) -> None:
        """Commits the memory of a sequence of `tokens` tokens ahead of need. May be called from any thread."""
        self._pool.warm(self.size(tokens))

    def size(self, tokens: int) -> int:
        """Returns the bytes that a sequence of at most `tokens` tokens reserves."""
        return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS * self._decoder.buffer_bytes_per_token

    def fits(self, reserved: int) -> bool:
        return self.used + reserved <= self.budget

    def take(self, tokens: int) -> Buffer:
        """Returns a buffer for `tokens` tokens. The caller has asked `fits` first."""
        reserved = self.size(tokens)
        if not self.fits(reserved):
            raise MemoryError(f"{reserved} bytes of KV do not fit: {self.used} of {self.budget} are in use")
        self.used += reserved
        block = self._pool.take(reserved)
        kv, entering = self._decoder.lay_out(block.bytes, tokens)
        return Buffer(kv, entering, reserved, block, self._pool)

    def give_back(self, buffer: Buffer) -> None:
        """Ends the buffer's reservation; whoever still holds it keeps its memory alive."""
        self.used -= buffer.reserved
        buffer.let_go()
