"""What KV memory can put into a sequence's buffer, and what of that is worth it.

Invariants:
- The request's own KV goes before everything else. Where it ends, KV of another version follows if the request allows
  that, else tokens are lifted: the KV below the first layer that is not shared, and what enters that layer, are
  restored, and the engine computes the layers above.
- Tokens are told as restored where every layer of them is in the buffer. What is told of a token's KV is the worst of
  its bands: the slowest tier, the least fidelity.
- Only exact states are lifted from: how much an error in them would matter was never measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memory.kv.fidelity import Fidelity
from memory.kv.identity import Ids
from memory.kv.match import ChunkRef, Match
from memory.kv.store import KVStore, Loaded
from serve.engine.bands import Band, entering_band, kv_bands
from serve.engine.pages import Buffer
from serve.engine.request import Exactness, Source
from serve.engine.sequence import Job, Restoration, Restored, worst

SLOWEST: tuple[Source, ...] = ("ram", "disk", "remote")


@dataclass(frozen=True)
class _Found:
    """A band and what is stored of it."""

    band: Band
    match: Match

    def until(self, tokens: int) -> _Found:
        """Its part within the first `tokens` tokens; the last chunk serves in part."""
        return _Found(self.band, trimmed(self.match, tokens))

    def reaching(self, tokens: int) -> _Found:
        """Its chunks that reach beyond the first `tokens` tokens."""
        return _Found(
            self.band, replace(self.match, chunks=tuple(c for c in self.match.chunks if c.start + c.tokens > tokens))
        )


class Restorer:
    """Restores one sequence. Runs on memory's thread; the buffer is held by the caller."""

    def __init__(self, store: KVStore, job: Job, ids: Ids, buffer: Buffer) -> None:
        """`ids` are all tokens of the sequence; the last is always left to compute, since its logits are needed."""
        self._store = store
        self._job = job
        self._ids = ids[:-1]
        self._total = len(ids)
        self._buffer = buffer
        self._least: Fidelity = job.request.kv.least_fidelity

    def run(self) -> Restoration:
        """Loads what pays and tells what is there."""
        salt = self._job.request.cache_salt
        found = [self._find(band) for band in kv_bands(self._job.version, salt)]
        whole = min(each.match.tokens for each in found)
        beside = trimmed(found[1].match, whole) if len(found) > 1 else None
        first = trimmed(found[0].match, whole)
        tokens = self._store.cost.tokens_to_load(first, self._total, *([beside] if beside else []))
        if tokens == whole:  # less than all of it was not worth it: then neither is what lies behind
            restoration = self._reuse(found, tokens) or self._lift(found, tokens)
            if restoration is not None:
                return restoration
        return self._whole([each.until(tokens) for each in found])

    def _find(self, band: Band, least: Fidelity | None = None) -> _Found:
        return _Found(band, self._store.match(band.identity, self._ids, least=least or self._least))

    def _load(self, found: _Found) -> list[Loaded]:
        if not found.match.chunks:
            return []
        return self._store.load_from(found.band.identity, found.match, found.band.of(self._buffer))

    def _whole(self, found: Sequence[_Found]) -> Restoration:
        """Restores the request's own KV, all bands alike."""
        loaded = [self._load(each) for each in found]
        runs = _runs(loaded, 0, self._job.version.weights_id)
        return Restoration(runs, fidelity=worst(*(run.fidelity for run in runs)), entering_from=_tokens(runs))

    def _reuse(self, found: Sequence[_Found], tokens: int) -> Restoration | None:
        """Goes on from the first `tokens` tokens with another version's KV; None where there is none of use."""
        other = self._job.reuse
        if other is None:
            return None
        theirs = [self._find(band).reaching(tokens) for band in kv_bands(other, self._job.request.cache_salt)]
        end = min((_end(each.match) for each in theirs), default=0)
        chunks = [chunk for each in theirs for chunk in each.match.chunks]
        if end <= tokens or not self._store.cost.pays(chunks, tokens, end, self._total, lift=False):
            return None
        # Theirs first: where chunks overlap, the request's own is written over it.
        loaded = [self._load(each.until(end)) for each in theirs]
        own = self._whole([each.until(tokens) for each in found])
        if own.tokens < tokens:
            return own
        runs = _runs(loaded, tokens, other.weights_id, starts=[_start(each.match) for each in theirs])
        stale = tuple(replace(run, fidelity="stale") for run in runs)
        fidelity: Exactness = "stale" if stale else own.fidelity
        return Restoration(own.runs + stale, fidelity=fidelity, entering_from=own.tokens + _tokens(stale))

    def _lift(self, found: Sequence[_Found], tokens: int) -> Restoration | None:
        """Goes on from the first `tokens` tokens with lifted ones; None where there are none, or it does not pay."""
        entering = entering_band(self._job.version, self._job.request.cache_salt)
        if entering is None or found[0].match.tokens <= tokens:
            return None
        states = self._find(entering, least="exact").reaching(tokens)
        end = min(found[0].match.tokens, _end(states.match))
        if end <= tokens or _start(states.match) > tokens:
            return None
        below, states = found[0].until(end), states.until(end)
        chunks = (*below.reaching(tokens).match.chunks, *states.match.chunks)
        if not self._store.cost.pays(chunks, tokens, end, self._total, lift=True):
            return None
        lower, upper = self._load(below), self._load(found[1].until(tokens))
        runs = _runs([_cut(lower, tokens), upper], 0, self._job.version.weights_id)
        whole = _tokens(runs)
        first = _start(states.match)
        last = min(sum(each.tokens for each in lower), first + sum(each.tokens for each in self._load(states)))
        restored = worst(*(run.fidelity for run in runs))
        if whole < tokens or last <= whole:  # something was gone or bad by the time it was read
            return Restoration(runs, fidelity=restored, entering_from=whole)
        fidelity = worst(restored, *(each.fidelity for each in lower))
        return Restoration(runs, last - whole, fidelity, entering_from=first)


def trimmed(match: Match, tokens: int) -> Match:
    """The part of a match that serves the first `tokens` tokens; its last chunk may serve in part."""
    chunks: list[ChunkRef] = []
    for chunk in match.chunks:
        left = tokens - chunk.start
        if left <= 0:
            break
        if left < chunk.tokens:
            chunk = replace(chunk, tokens=left, whole=False, ids=chunk.ids[: 4 * left])
        chunks.append(chunk)
    return replace(match, chunks=tuple(chunks))


def _start(match: Match) -> int:
    return match.chunks[0].start if match.chunks else 0


def _end(match: Match) -> int:
    return match.chunks[-1].start + match.chunks[-1].tokens if match.chunks else 0


def _tokens(runs: Sequence[Restored]) -> int:
    return sum(run.tokens for run in runs)


def _cut(loaded: Sequence[Loaded], tokens: int) -> list[Loaded]:
    """The first of the chunks that were loaded, up to `tokens` tokens."""
    kept = []
    for each in loaded:
        kept.append(replace(each, tokens=min(each.tokens, tokens)))
        tokens -= kept[-1].tokens
    return [each for each in kept if each.tokens]


def _runs(
    bands: Sequence[Sequence[Loaded]], tokens: int, weights_id: str, starts: Sequence[int] | None = None
) -> tuple[Restored, ...]:
    """What of the tokens from `tokens` on is there in all bands, each of which was loaded from its start on."""
    edges = [_edges(loaded, starts[at] if starts else 0) for at, loaded in enumerate(bands)]
    end = min((spans[-1][0] if spans else 0 for spans in edges), default=0)
    runs: list[Restored] = []
    places = [0] * len(edges)
    while tokens < end:
        for band, spans in enumerate(edges):
            while spans[places[band]][0] <= tokens:
                places[band] += 1
        here = [spans[place] for spans, place in zip(edges, places, strict=True)]
        cut = min(edge for edge, _ in here)
        source: Source = max((each.tier for _, each in here), key=SLOWEST.index)
        run = Restored(cut - tokens, source, weights_id, worst(*(each.fidelity for _, each in here)))
        if runs and (runs[-1].source, runs[-1].fidelity) == (run.source, run.fidelity):
            run = replace(run, tokens=run.tokens + runs.pop().tokens)
        runs.append(run)
        tokens = cut
    return tuple(runs)


def _edges(loaded: Sequence[Loaded], start: int) -> list[tuple[int, Loaded]]:
    """Where each of the adjoining chunks ends."""
    edges = []
    for each in loaded:
        start += each.tokens
        edges.append((start, each))
    return edges
