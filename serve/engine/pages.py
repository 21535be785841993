"""The KV buffers of running sequences and the byte budget they share.

A sequence reserves room for its longest reply when it is admitted, so a running sequence never waits for memory and
is never thrown out. Room is counted in pages; the memory itself is committed by the system as tokens are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

PAGE_TOKENS = 64


@dataclass(frozen=True)
class Buffer:
    """One sequence's KV [layers, 2, kv_heads, capacity, head_dim] and the bytes reserved for it."""

    kv: torch.Tensor
    reserved: int


class PageBudget:
    """Hands out buffers while their sum stays within `budget_bytes`. Used from the engine's thread only."""

    def __init__(self, new_kv: Callable[[int], torch.Tensor], bytes_per_token: int, budget_bytes: int) -> None:
        self._new_kv = new_kv
        self._bytes_per_token = bytes_per_token
        self.budget = budget_bytes
        self.used = 0

    def size(self, tokens: int) -> int:
        """Returns the bytes that a sequence of at most `tokens` tokens reserves."""
        return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS * self._bytes_per_token

    def fits(self, reserved: int) -> bool:
        return self.used + reserved <= self.budget

    def take(self, tokens: int) -> Buffer:
        """Returns a buffer for `tokens` tokens. The caller has asked `fits` first."""
        reserved = self.size(tokens)
        if not self.fits(reserved):
            raise MemoryError(f"{reserved} bytes of KV do not fit: {self.used} of {self.budget} are in use")
        self.used += reserved
        return Buffer(self._new_kv(tokens), reserved)

    def give_back(self, buffer: Buffer) -> None:
        """Ends the buffer's reservation; whoever still holds its tensor keeps that alive."""
        self.used -= buffer.reserved
