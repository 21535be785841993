"""Measures beside serving: what replaced KV does to a version's answers, in a thread that yields to the engine's.

One measurement runs at a time. The versions it needs stay resident until it ends.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from memory.kv.codec.factory import Codecs
from memory.kv.fidelity import Fidelity, FidelityRecord, FidelityRecords
from serve.engine import measure
from serve.engine.bands import kv_bands
from serve.engine.divergence import CodedLayers, Divergences, Variant, computed_by, divergences, through_codecs
from serve.engine.errors import EngineError, InvalidRequest
from serve.engine.versions import Version, Versions

log = logging.getLogger(__name__)
NICE = 10


class Probing:
    """Thread-safe. Its methods take long, and run in the caller's thread."""

    def __init__(self, versions: Versions, codecs: Codecs, records: FidelityRecords | None) -> None:
        """`records` is where measured rungs are kept; None without a KV memory."""
        self._versions = versions
        self._codecs = codecs
        self._records = records
        self._one_at_a_time = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits until no other measurement runs; lowers the thread's priority for good."""
        with self._one_at_a_time:
            _lower_priority()
            yield

    def measure(self) -> list[FidelityRecord]:
        """Calibrates and measures every rung on the base model and its bundled text; what is found is kept.

        Raises `InvalidRequest` without a KV memory, `EngineError` where the model cannot be measured.
        """
        if self._records is None:
            raise InvalidRequest("there is no KV memory to measure for: set kv_folder")
        with self.turn(), ExitStack() as stack:
            base = self._acquire(stack, self._versions.base.name)
            try:
                return measure.measure(base, self._codecs, self._records, measure.tokenizer_of(base.path))
            except OSError as error:
                raise EngineError(f"what was measured cannot be kept: {error}") from error

    def divergence(
        self,
        model: str,
        prompts: Sequence[Sequence[int]],
        prefixes: Sequence[int],
        codecs: Sequence[Fidelity],
        versions: Sequence[str],
        answer_tokens: int,
    ) -> Divergences:
        """How far `model`'s next-token distributions move where the first `prefixes` tokens of the prompts are read
        from KV that went through each codec, or that each version computed. Variants are named "codec ..." and
        "version ...".

        Answers are shorter where the context ends before. Raises `InvalidRequest` and `VersionNotFound`.
        """
        if len(prefixes) != len(prompts):
            raise InvalidRequest(f"prefixes has {len(prefixes)} entries for {len(prompts)} prompts: give one for each")
        with self.turn(), ExitStack() as stack:
            version = self._acquire(stack, model)
            decoder = version.decoder
            self._check(version, prompts)
            variants: dict[str, Variant] = {f"codec {name}": self._coded(version, name) for name in codecs}
            for name in versions:
                variants[f"version {name}"] = computed_by(self._acquire(stack, name).decoder)
            room = decoder.context - max(len(prompt) for prompt in prompts)
            try:
                return divergences(decoder, variants, prompts, prefixes, answer_tokens=max(0, min(answer_tokens, room)))
            except ValueError as error:
                raise InvalidRequest(f"prompts or prefixes: {error}") from error

    def _acquire(self, stack: ExitStack, name: str) -> Version:
        version = self._versions.acquire(name)
        stack.callback(self._versions.release, version)
        return version

    def _check(self, version: Version, prompts: Sequence[Sequence[int]]) -> None:
        vocabulary = version.decoder.config.vocabulary
        for number, prompt in enumerate(prompts):
            if not prompt or not 0 <= min(prompt) <= max(prompt) < vocabulary:
                raise InvalidRequest(f"prompts.{number} is empty or has token ids outside 0 .. {vocabulary - 1}")

    def _coded(self, version: Version, name: Fidelity) -> Variant:
        layers = []
        for band in kv_bands(version, ""):
            codec = self._codecs.encoder(name, band.identity.model_digest())
            if codec is None:
                raise InvalidRequest(f"codecs: {name!r} is not calibrated for this model: POST /v1/kv/measure first")
            layers.append(CodedLayers(codec, band.first, band.last))
        return through_codecs(layers)


def _lower_priority() -> None:
    """On Linux a thread has a niceness of its own, and a thread that measures has nothing more urgent to do."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except OSError as error:
        log.info("measuring keeps its priority: %s", error)
