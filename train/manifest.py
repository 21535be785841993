"""The manifest of an adapter: what it was made from, and how to prove that it is what is being served.

The fingerprint's log-probs are computed the way serving computes them: the LoRA added to the weights in float32, the
sum rounded to the weights' own type, and no autocast.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from memory.files import write_atomic
from train.packing import Row

MANIFEST = "manifest.json"
FORMAT = 1
PROBES = 4
TOLERANCE = 0.15


class BadManifest(ValueError):
    """The folder is no adapter with a manifest this version can read."""


@dataclass(frozen=True)
class Probe:
    """A prompt with the log-prob of each of its tokens but the first, in nats: length is that of `token_ids` less 1."""

    token_ids: list[int]
    adapter_logprobs: list[float]
    base_logprobs: list[float]


@dataclass(frozen=True)
class Fingerprint:
    """`tolerance`: the mean absolute difference in nats up to which served log-probs count as the adapter's."""

    probes: list[Probe]
    tolerance: float


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`. Digests are hexadecimal BLAKE3; `created_at` is UTC, ISO 8601."""

    name: str
    base_weights_id: str
    adapter_digest: str
    tokenizer_digest: str
    template_digest: str
    dataset_digest: str
    recipe: str
    recipe_settings: dict[str, Any]
    seed: int
    parents: list[str]
    metrics: dict[str, Any]
    fingerprint: Fingerprint
    created_at: str
    format: int = FORMAT


def now() -> str:
    """The time for `Manifest.created_at`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` durably."""
    write_atomic(folder / MANIFEST, json.dumps(asdict(manifest), indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """Raises `BadManifest` when there is none, or when it is of another format."""
    try:
        fields = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise BadManifest(f"{folder / MANIFEST} has format {fields['format']}; this version reads {FORMAT}")
        probes = [Probe(**probe) for probe in fields["fingerprint"]["probes"]]
        fingerprint = Fingerprint(probes, fields["fingerprint"]["tolerance"])
        return Manifest(**{**fields, "fingerprint": fingerprint})
    except BadManifest:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BadManifest(f"{folder} is no adapter with a manifest: {error!r}") from error


def file_digest(path: Path) -> str:
    """Digest of a file's bytes."""
    digest = blake3()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def template_digest(tokenizer: Any) -> str:
    """Digest of the chat template's text."""
    return blake3(str(tokenizer.chat_template).encode()).hexdigest()


def fingerprint(peft_model: Any, rows: Sequence[Row]) -> Fingerprint:
    """Takes probes from `rows`, spread over them.

    Adds the LoRA to the model's weights for good: call it last.
    """
    count = min(PROBES, len(rows))
    chosen = [rows[len(rows) * number // count] for number in range(count)]
    with peft_model.disable_adapter():
        base = [token_logprobs(peft_model, row) for row in chosen]
    _merge(peft_model)
    with peft_model.disable_adapter():
        adapted = [token_logprobs(peft_model, row) for row in chosen]
    probes = [
        Probe(row.token_ids.tolist(), ours, theirs) for row, ours, theirs in zip(chosen, adapted, base, strict=True)
    ]
    return Fingerprint(probes, TOLERANCE)


@torch.no_grad()
def token_logprobs(model: Any, row: Row) -> list[float]:
    """log p(token | tokens before it) for every token of the row but the first, in nats."""
    ids = torch.from_numpy(row.token_ids)
    scores = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float().log_softmax(-1)
    return [round(value, 5) for value in scores.gather(-1, ids[1:, None])[:, 0].tolist()]


@torch.no_grad()
def _merge(peft_model: Any) -> None:
    for module in peft_model.modules():
        if hasattr(module, "get_delta_weight") and hasattr(module, "lora_A"):
            weight = module.get_base_layer().weight
            weight.copy_(weight.float() + module.get_delta_weight("default").float())
