"""Measures what each rung of the fidelity ladder costs a model, on the text that ships with this package.

First the compact codec is given its basis for each band of the model that has none; then every rung's KV replaces the
exact one before text that calibration never saw. Texts are of several kinds: prose, dialogue, code, documents, lists.
Runs in any thread, for minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from memory.kv.chunk import HEADER_BYTES, TAG_BYTES
from memory.kv.codec.base import NOTHING_KEPT, Codec, Kept, KVArray
from memory.kv.codec.basis import Basis
from memory.kv.codec.compact import CompactCodec
from memory.kv.codec.compact_calibrate import DEFAULT_BITS, Sample, calibrate
from memory.kv.codec.compact_rotation import turns_of
from memory.kv.codec.factory import Codecs
from memory.kv.fidelity import RUNGS, Fidelity, FidelityRecord, FidelityRecords
from memory.kv.identity import PREFIX_BYTES, PREFIX_TOKENS
from serve.engine.bands import Band, as_array, kv_bands
from serve.engine.divergence import (
    CHUNK_TOKENS,
    HEAD_TOKENS,
    TAIL_TOKENS,
    CodedLayers,
    Variant,
    divergences,
    prefill,
    through_codecs,
)
from serve.engine.errors import EngineError
from serve.engine.model import Decoder
from serve.engine.rope import inverse_frequencies
from serve.engine.sensitivity import fisher
from serve.engine.versions import Version

TEXTS = Path(__file__).with_name("data")
PREFIX_TOKENS_MEASURED, FOLLOWING_TOKENS = 1024, 512
CALIBRATION_FOLLOWING = 256
SESSION_TOKENS = 4096
"""Bytes per token are those of a session of so many."""
FILE_BYTES = HEADER_BYTES + TAG_BYTES + CHUNK_TOKENS * 4 + CHUNK_TOKENS // PREFIX_TOKENS * PREFIX_BYTES
"""What a chunk's file holds besides its payload."""

Encode = Callable[[str], Sequence[int]]


def bundled_texts(purpose: str) -> dict[str, str]:
    """The texts for "calibrate" or "measure", by kind."""
    paths = sorted(TEXTS.glob(f"{purpose}-*.txt"))
    return {path.stem.removeprefix(f"{purpose}-"): path.read_text(encoding="utf-8") for path in paths}


def tokenizer_of(folder: Path) -> Encode:
    """Turns text into the model's token ids. Raises `EngineError` where the folder has no tokenizer."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise EngineError(f"{folder} has no tokenizer.json, so bundled text cannot be measured with this model")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def measure(version: Version, codecs: Codecs, records: FidelityRecords, encode: Encode) -> list[FidelityRecord]:
    """Calibrates what is not calibrated, measures every rung on `version` (a base), keeps and returns the records.

    Raises `EngineError` where the model's context is too short, `OSError` where nothing can be kept.
    """
    bands = kv_bands(version, "")
    calibrate_bands(version, bands, codecs, encode)
    windows = cut(encode, bundled_texts("measure"), version.decoder.context, PREFIX_TOKENS_MEASURED, FOLLOWING_TOKENS)
    weighed = {rung: Weighed.of(bands, codecs, rung) for rung in RUNGS}
    variants: dict[str, Variant] = {rung: each.variant for rung, each in weighed.items()}
    found = divergences(version.decoder, variants, windows.prompts, [windows.prefix] * len(windows.prompts))
    base = version.weights_id.split("+", 1)[0]
    written = []
    for rung, each in weighed.items():
        divergence = found.variants[rung]
        record = FidelityRecord(
            weights_id_base=base,
            codec=rung,
            kl_mean=divergence.kl_mean,
            kl_p95=divergence.kl_p95,
            top1=divergence.top1,
            tokens=divergence.tokens,
            noise_kl=found.noise or 0.0,
            bytes_per_token=each.bytes_per_token,
            ratio=version.decoder.kv_bytes_per_token / each.bytes_per_token,
            measured_at=time.time(),
        )
        records.put(record)
        written.append(record)
    return written


def calibrate_bands(version: Version, bands: Sequence[Band], codecs: Codecs, encode: Encode) -> None:
    """Gives the compact codec a basis for each band that has none. Raises `EngineError`, `OSError`."""
    compact = codecs.named("compact")
    if not isinstance(compact, CompactCodec):
        raise TypeError("the codec named compact takes no basis")
    missing = [band for band in bands if codecs.encoder("compact", band.identity.model_digest()) is None]
    for band in missing:
        basis = calibrated(version.decoder, range(band.first, band.last), encode)
        compact.bases.put(band.identity.model_digest(), basis)


def calibrated(decoder: Decoder, layers: range, encode: Encode, bits: float = DEFAULT_BITS) -> Basis:
    """The compact codec's basis for these layers, from the bundled text."""
    (basis,) = calibrated_at(decoder, layers, encode, [bits])
    return basis


def calibrated_at(decoder: Decoder, layers: range, encode: Encode, rates: Sequence[float]) -> list[Basis]:
    """A basis for each of several rates, in bits a number."""
    windows = cut(encode, bundled_texts("calibrate"), decoder.context, PREFIX_TOKENS_MEASURED, CALIBRATION_FOLLOWING)
    turns = turns_of(inverse_frequencies(decoder.config.rope, decoder.config.head_dim).numpy().astype(np.float64))
    samples: list[Sample] = []
    information: NDArray[np.float64] | None = None
    # The tail is not coded by the transform, so what the next tokens say about it is not asked for.
    skip = min(HEAD_TOKENS, windows.prefix // 8), min(TAIL_TOKENS, windows.prefix // 4)
    for number, prompt in enumerate(windows.prompts):
        with torch.inference_mode():
            kv = decoder.new_kv(len(prompt))
            prefill(decoder, prompt, 0, kv)
        found = fisher(decoder, prompt, kv[:, :, :, : windows.prefix], turns, layers, skip, seed=number)
        information = found if information is None else information + found
        samples.append(Sample(as_array(kv)[layers.start : layers.stop]))
    assert information is not None
    return [calibrate(samples, information / len(samples), turns, bits) for bits in rates]


@dataclass(frozen=True)
class Windows:
    """Stretches of text of one length, and how many of their tokens are the prefix."""

    prompts: list[list[int]]
    prefix: int


def cut(encode: Encode, texts: Mapping[str, str], context: int, prefix: int, following: int) -> Windows:
    """Cuts the texts, one after the other, into windows; shorter ones where the context is short.

    Raises `EngineError` where it is too short to say anything.
    """
    ids = [token for text in texts.values() for token in encode(text)]
    size = min(prefix + following, context, len(ids))
    if size < 64:
        raise EngineError(f"a context of {context} tokens is too short to measure what stored KV costs")
    begin = size * prefix // (prefix + following)
    return Windows([list(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size)], begin)


@dataclass
class Weighed:
    """A rung's codecs for all bands, with what their payloads weigh."""

    codecs: list[_Weighing]
    variant: Variant

    @classmethod
    def of(cls, bands: Sequence[Band], codecs: Codecs, rung: Fidelity) -> Weighed:
        weighing = []
        for band in bands:
            codec = codecs.encoder(rung, band.identity.model_digest())
            if codec is None:
                raise EngineError(f"the codec {rung} has no basis for the band {band.identity.band}")
            weighing.append(_Weighing(codec))
        coded = [CodedLayers(codec, band.first, band.last) for codec, band in zip(weighing, bands, strict=True)]
        return cls(weighing, through_codecs(coded))

    @property
    def bytes_per_token(self) -> float:
        """Of the files of a session of `SESSION_TOKENS`, whose last tokens are kept."""
        return sum(codec.session_bytes for codec in self.codecs) / SESSION_TOKENS


@dataclass
class _Weighing:
    """A codec that notes the bytes of a token in chunks with and without the kept tail."""

    codec: Codec
    plain: list[tuple[int, int]] = field(default_factory=list)
    tails: list[tuple[int, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.codec.name

    def encode(self, kv: KVArray, kept: Kept = NOTHING_KEPT, start: int = 0) -> bytes:
        payload = self.codec.encode(kv, kept, start)
        (self.tails if kept.tail else self.plain).append((len(payload), kv.shape[3]))
        return payload

    def decode(self, payload: memoryview, out: KVArray, start: int = 0) -> None:
        self.codec.decode(payload, out, start)

    @property
    def session_bytes(self) -> float:
        tail = _per_token(self.tails or self.plain) * CHUNK_TOKENS
        before = _per_token(self.plain or self.tails) * (SESSION_TOKENS - CHUNK_TOKENS)
        return tail + before + FILE_BYTES * SESSION_TOKENS / CHUNK_TOKENS


def _per_token(weights: Sequence[tuple[int, int]]) -> float:
    return sum(size for size, _ in weights) / sum(tokens for _, tokens in weights)
