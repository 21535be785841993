"""The ladder of fidelity: how far stored KV may be from what the model computed, and what that was measured to cost.

Invariants:
- The fidelity of a chunk is the worse of its codec and of the KV that it was computed over. It never improves by
  being written again, only by being computed again.
- A rung is trusted for a model where a record says what it costs that model; records are files that one process
  writes whole and others read.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3

from memory.files import write_atomic

logger = logging.getLogger(__name__)
Fidelity = Literal["exact", "int8", "int4", "compact"]
RUNGS: tuple[Fidelity, ...] = ("exact", "int8", "int4", "compact")
"""From the best to the worst."""


def fidelity_named(name: str) -> Fidelity:
    """`name` as a rung. Raises `ValueError`, naming the rungs."""
    if name not in RUNGS:
        raise ValueError(f"fidelity {name!r} is unknown; the rungs are {', '.join(RUNGS)}")
    return name


def worse(one: Fidelity, other: Fidelity) -> Fidelity:
    """The worse of two rungs."""
    return max(one, other, key=RUNGS.index)


def at_least(fidelity: Fidelity, least: Fidelity) -> bool:
    """Whether `fidelity` is as good as `least` or better."""
    return RUNGS.index(fidelity) <= RUNGS.index(least)


@dataclass(frozen=True, slots=True)
class FidelityRecord:
    """What one rung was measured to cost one model, against exact KV and the same tokens."""

    weights_id_base: str
    """Digest of the base's weights: the part of a weights id before `+`."""
    codec: Fidelity
    kl_mean: float
    """Mean KL divergence of the next-token distribution, in nats."""
    kl_p95: float
    top1: float
    """Share of tokens whose most likely successor is the same."""
    tokens: int
    """Tokens that were compared."""
    noise_kl: float
    """KL of exact KV against itself, computed in another shape: what arithmetic alone costs."""
    bytes_per_token: float
    ratio: float
    """Raw bytes over stored bytes."""
    measured_at: float
    """Seconds since the epoch."""


class FidelityRecords:
    """The records of one folder. Thread-safe; many processes may use the folder.

    Reading never raises: a record that cannot be read is none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._bases: dict[bytes, str] = {}

    def get(self, weights_id: str, codec: str) -> FidelityRecord | None:
        """The record of a base (the base of a version's weights id) and a rung, or None."""
        base = weights_id.split("+", 1)[0]
        record = _read_record(self._record_path(base, codec))
        return record if record and (record.weights_id_base, record.codec) == (base, codec) else None

    def put(self, record: FidelityRecord) -> None:
        """Writes a record durably, in the place of an older one. Raises `OSError`."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = json.dumps(asdict(record), indent=1).encode()
        write_atomic(self._record_path(record.weights_id_base, record.codec), data, mode=0o600)

    def all(self) -> list[FidelityRecord]:
        """Every record, by base and from the best rung to the worst."""
        found = [_read_record(path) for path in self._folder.glob("record-*.json")]
        records = [record for record in found if record is not None]
        return sorted(records, key=lambda record: (record.weights_id_base, RUNGS.index(record.codec)))

    def learn(self, model: bytes, weights_id: str) -> None:
        """Notes which base the chunks of a model digest belong to. Raises `OSError`; once noted, costs nothing."""
        base = weights_id.split("+", 1)[0]
        with self._lock:
            if self._bases.get(model) == base:
                return
        if _read(self._model_path(model)).get("weights_id_base") != base:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(self._model_path(model), json.dumps({"weights_id_base": base}).encode(), mode=0o600)
        with self._lock:
            self._bases[model] = base

    def base_of(self, model: bytes) -> str | None:
        """The base of a model digest's chunks, or None where it was never noted."""
        with self._lock:
            known = self._bases.get(model)
        if known is None:
            noted = _read(self._model_path(model)).get("weights_id_base")
            known = noted if isinstance(noted, str) else None
        return known

    def for_model(self, model: bytes, codec: str) -> FidelityRecord | None:
        """The record of a rung for the chunks of a model digest (`KVIdentity.model_digest`), or None."""
        base = self.base_of(model)
        return self.get(base, codec) if base is not None else None

    def _record_path(self, base: str, codec: str) -> Path:
        return self._folder / f"record-{blake3(base.encode()).hexdigest(16)}-{codec}.json"

    def _model_path(self, model: bytes) -> Path:
        return self._folder / f"model-{model.hex()}.json"


def _read_record(path: Path) -> FidelityRecord | None:
    values = _read(path)
    try:
        record = FidelityRecord(**{entry.name: values[entry.name] for entry in fields(FidelityRecord)})
        fidelity_named(record.codec)
        return record
    except (KeyError, TypeError, ValueError):
        if values:
            logger.warning("the fidelity record %s is not one; it is left out", path)
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
