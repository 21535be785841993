"""Entropy coding of small integers: interleaved range asymmetric numeral systems (rANS), one lane for each token.

The integers come as a table [steps, lanes]; all of a step share one class, whose frequencies are known beforehand.
Each lane has a 32-bit state and takes 16-bit words from one common stream, in the order of steps and then of lanes;
so every step is a handful of operations over all lanes, in numpy as in native code. All arithmetic is on integers:
the bytes are the same everywhere.

Source: J. Duda, "Asymmetric numeral systems" (arXiv 1311.2540); interleaving as in F. Giesen (arXiv 1402.3392).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memory.kv.codec.base import CodecError

PRECISION = 12
"""Bits of a frequency: those of a class sum to 2^12."""
TOTAL = 1 << PRECISION
LOWEST = 1 << 16
"""A state is in [2^16, 2^32) between steps, and 2^16 before the first symbol."""
RADIUS_LIMIT = 126
"""A number or its escape fits into a signed byte."""

Words = NDArray[np.uint16]


@dataclass(frozen=True)
class Coded:
    """The states that decoding begins with, one for each lane; the words; the numbers that no symbol stands for."""

    states: NDArray[np.uint32]
    words: Words
    escapes: NDArray[np.int32]


class SymbolModel:
    """Classes of distributions over -radius..radius and an escape, which is the symbol after the largest number."""

    def __init__(self, frequencies: list[NDArray[np.uint16]]) -> None:
        """`frequencies[c]` has 2 radius + 2 entries, all above zero, that sum to 2^12. Raises `CodecError`."""
        for each in frequencies:
            fits = each.ndim == 1 and each.size % 2 == 0 and 2 <= each.size <= 2 * RADIUS_LIMIT + 2
            if not fits or int(each.min()) < 1 or int(each.sum()) != TOTAL:
                raise CodecError("the frequencies of a class do not sum to 4096")
        self.frequencies = frequencies
        self.radius = np.array([each.size // 2 - 1 for each in frequencies], np.int32)

    @cached_property
    def by_symbol(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Frequency and cumulated frequency, each [classes, symbols of the largest class]."""
        shape = len(self.frequencies), max(each.size for each in self.frequencies)
        frequency, cumulated = np.ones(shape, np.uint32), np.zeros(shape, np.uint32)
        for place, each in enumerate(self.frequencies):
            frequency[place, : each.size] = each
            cumulated[place, 1 : each.size] = np.cumsum(each[:-1], dtype=np.uint32)
        return frequency, cumulated

    @cached_property
    def by_slot(self) -> tuple[NDArray[np.int16], NDArray[np.uint16], NDArray[np.uint16]]:
        """For each class and slot [classes, 4096]: the number (radius + 1: escape), frequency, place in the symbol."""
        shape = len(self.frequencies), TOTAL
        number, frequency, place_in = np.zeros(shape, np.int16), np.zeros(shape, np.uint16), np.zeros(shape, np.uint16)
        for place, each in enumerate(self.frequencies):
            symbols = np.repeat(np.arange(each.size), each)
            number[place] = symbols - self.radius[place]
            frequency[place] = each[symbols]
            place_in[place] = np.arange(TOTAL) - (np.cumsum(each) - each)[symbols]
        return number, frequency, place_in

    @cached_property
    def packed(self) -> NDArray[np.uint32]:
        """`by_slot` in one number [classes, 4096]: frequency - 1, place << 12, number + 128 << 24."""
        number, frequency, place_in = (each.astype(np.int64) for each in self.by_slot)
        packed: NDArray[np.uint32] = (frequency - 1 | place_in << 12 | number + 128 << 24).astype(np.uint32)
        return packed

    def encode(self, numbers: NDArray[np.int32], classes: NDArray[np.uint8]) -> Coded:
        """Codes `numbers` [steps, lanes]; `classes` [steps]."""
        radius = self.radius[classes][:, None]
        escaped = np.abs(numbers) > radius
        symbols = np.where(escaped, 2 * radius + 1, numbers + radius)
        frequency, cumulated = self.by_symbol
        states = np.full(numbers.shape[1], LOWEST, np.uint32)
        pieces: list[Words] = []
        for step in range(len(numbers) - 1, -1, -1):
            row, chosen = classes[step], symbols[step]
            count, below = frequency[row].take(chosen), cumulated[row].take(chosen)
            full = (states >> np.uint32(32 - PRECISION)) >= count
            if full.any():
                pieces.append(states[full].astype(np.uint16))
                states[full] >>= np.uint32(16)
            quotient, rest = np.divmod(states, count)
            states = (quotient << np.uint32(PRECISION)) + rest + below
        words = np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.uint16)
        return Coded(states, words, numbers[escaped])

    def decode(self, coded: Coded, classes: NDArray[np.uint8]) -> NDArray[np.int32]:
        """The numbers [steps, lanes]. Raises `CodecError` where the words are not those of `encode`."""
        number, frequency, place_in = self.by_slot
        states = coded.states.copy()
        numbers = np.empty((len(classes), len(states)), np.int32)
        words, taken = coded.words.astype(np.uint32), 0
        mask, sixteen = np.uint32(TOTAL - 1), np.uint32(16)
        for step, row in enumerate(classes):
            slots = states & mask
            numbers[step] = number[row].take(slots)
            states >>= np.uint32(PRECISION)
            states *= frequency[row].take(slots)
            states += place_in[row].take(slots)
            empty = (states < LOWEST).nonzero()[0]
            if empty.size:
                if taken + empty.size > words.size:
                    raise CodecError("the coded numbers end early")
                states[empty] = (states[empty] << sixteen) | words[taken : taken + empty.size]
                taken += empty.size
        if taken != words.size or (states != LOWEST).any():
            raise CodecError("the coded numbers do not end where they should")
        escaped = numbers > self.radius[classes][:, None]
        if int(escaped.sum()) != coded.escapes.size:
            raise CodecError("the numbers without a symbol are not as many as are marked")
        numbers[escaped] = coded.escapes
        return numbers


def frequencies_of(counts: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Frequencies for a class whose number n came up `counts[RADIUS_LIMIT + n]` times, taken as symmetrical.

    Numbers that come up less than once in 8,192 times are left to the escape.
    """
    folded = counts + counts[::-1]
    share = folded / max(folded.sum(), 1e-9)
    common = np.nonzero(share[RADIUS_LIMIT:] * TOTAL >= 0.5)[0]
    radius = min(RADIUS_LIMIT, int(common[-1])) if common.size else 0
    inside = share[RADIUS_LIMIT - radius : RADIUS_LIMIT + radius + 1]
    wanted = np.append(inside, max(0.0, 1.0 - inside.sum())) * TOTAL
    frequencies = np.maximum(1, np.floor(wanted)).astype(np.int64)
    frequencies[radius] += TOTAL - frequencies.sum()
    while frequencies[radius] < 1:
        largest = int(frequencies.argmax())
        moved = min(int(frequencies[largest]) - 1, 1 - int(frequencies[radius]))
        frequencies[largest] -= moved
        frequencies[radius] += moved
    narrow: NDArray[np.uint16] = frequencies.astype(np.uint16)
    return narrow
