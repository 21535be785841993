"""One choice's growing answer: ids become text, stop strings end it, log-probabilities travel with their text.

Invariant: the text given out is a prefix of the final text, and the ids kept decode to exactly the final text (but for
a character the model left unfinished at the very end).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve.backends.base import TokenLogprob
from serve.gateway.text import TextCodec


@dataclass(frozen=True)
class Piece:
    """New text of one choice, and the tokens whose text ends inside it. Either may be empty."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ChoiceOutput:
    """Collects one choice. `finish_reason` is None while it runs; tokens that come after its end are ignored."""

    def __init__(self, index: int, codec: TextCodec, stops: Sequence[str]) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.sampled = 0
        self._codec = codec
        self._stops = tuple(stops)
        self._longest_stop = max(map(len, self._stops), default=0)
        self._decoder = codec.vocabulary.decoder()
        self._decoded = ""
        self._given = 0  # characters given out
        self._ids: list[int] = []
        self._ends: list[int] = []  # for each settled id, the length of the text it completes
        self._cut: int | None = None  # where a stop string began
        self._logprobs: list[tuple[int, TokenLogprob]] = []  # (end, entry), not given out yet

    @property
    def text(self) -> str:
        """The whole answer; final once `finish_reason` is set."""
        return self._decoded if self._cut is None else self._decoded[: self._cut]

    def output_ids(self) -> list[int]:
        """The ids to remember: those whose text is inside `text`. A token that a stop string cuts in two is replaced
        by the encoding of the part that was given out, so that memory holds what the client saw."""
        if self._cut is None:
            return list(self._ids)
        kept = 0
        while kept < len(self._ends) and self._ends[kept] <= self._cut:
            kept += 1
        start = self._ends[kept - 1] if kept else 0
        return self._ids[:kept] + self._codec.encode_plain(self._decoded[start : self._cut])

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Piece:
        """Takes the next tokens; `logprobs` is empty or has one entry for each. Returns what became certain."""
        entries: Sequence[TokenLogprob | None] = logprobs or [None] * len(token_ids)
        for token_id, entry in zip(token_ids, entries, strict=True):
            if self.finish_reason is not None:
                break
            self._push_one(token_id, entry)
        return self._release(len(self._decoded) - self._held_back())

    def finish(self, reason: str) -> Piece:
        """The worker's end of this choice, or ours. Returns all that was held back."""
        if self.finish_reason is None:
            self._decoded += self._decoder.finish()
            self._settle()
            self.finish_reason = reason
            self._find_stop(0 if self._longest_stop == 0 else max(0, self._given - self._longest_stop))
        return self._release(len(self._decoded))

    def _push_one(self, token_id: int, entry: TokenLogprob | None) -> None:
        before = len(self._decoded)
        self._decoded += self._decoder.push(token_id)
        self._ids.append(token_id)
        self.sampled += 1
        if entry is not None and token_id not in self._codec.vocabulary.special_ids:
            self._logprobs.append((len(self._decoded), entry))
        if not self._decoder.pending:
            self._settle()
        if len(self._decoded) > before:
            self._find_stop(max(0, before - self._longest_stop + 1))

    def _settle(self) -> None:
        # Tokens inside one character are settled together, at that character's end.
        self._ends += [len(self._decoded)] * (len(self._ids) - len(self._ends))

    def _find_stop(self, start: int) -> None:
        # The string that is complete first wins, so that it does not matter how the text was cut into tokens.
        starts = [(self._decoded.find(stop, start), len(stop)) for stop in self._stops]
        found = [(at + length, at) for at, length in starts if at >= 0]
        if found:
            self._cut = min(found)[1]
            self.finish_reason = "stop"

    def _held_back(self) -> int:
        """Length of the longest end of the text that a stop string may begin with."""
        if self.finish_reason is not None:
            return 0
        for length in range(min(self._longest_stop - 1, len(self._decoded) - self._given), 0, -1):
            tail = self._decoded[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    def _release(self, end: int) -> Piece:
        end = min(end, len(self.text))
        text = self._decoded[self._given : end]
        self._given = max(self._given, end)
        ready = tuple(entry for at, entry in self._logprobs if at <= self._given)
        self._logprobs = [(at, entry) for at, entry in self._logprobs if at > self._given]
        return Piece(self.index, text, ready)
