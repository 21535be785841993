"""What `kvloop memory` does: tells what KV memory holds and what each rung costs, measures that, and empties it.

Invariants: telling reads the folder itself, so it works whether or not anything runs, and changes nothing in it;
emptying holds the supervisor's lock, so that no worker can serve from what is being deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from loop.config import Config
from loop.supervisor import SupervisorError, only_one, running_state
from memory.kv.fidelity import RUNGS
from memory.kv.settings import KVSettings
from memory.kv.store import KVStore

MEASURE_SECONDS = 3600.0
_UNBOUNDED = 2**62


class MemoryCommandError(RuntimeError):
    """A memory command cannot do its work now; the message says what to do."""


def report(config: Config) -> dict[str, Any]:
    """What the folder holds and what was measured, as JSON values.

    `rungs` has one entry for each fidelity something is stored at; `records` one for each rung that was measured on
    a model, and whether the ladder may use it there.
    """
    folder = _folder(config)
    found: dict[str, Any] = {"folder": str(folder), "tiers": {}, "rungs": [], "holdings": [], "records": []}
    if not folder.is_dir():
        return found
    settings = config.worker.kv
    with KVStore(_quiet(settings), folder) as store:
        holdings, records, stats = store.report(), store.fidelity.all(), store.stats()
        base_of = {each.model_hex: store.fidelity.base_of(bytes.fromhex(each.model_hex)) for each in holdings}
    found["tiers"]["disk"] = asdict(stats.disk) | {"budget": settings.disk_bytes}
    if settings.remote_url is not None or stats.remote.chunks:
        found["tiers"]["remote"] = asdict(stats.remote) | {"budget": settings.remote_bytes}
    found["holdings"] = [asdict(each) | {"weights_id_base": base_of[each.model_hex]} for each in holdings]
    found["rungs"] = by_rung(found["holdings"])
    limits = settings.max_kl
    found["records"] = [
        asdict(record) | {"max_kl": _finite(limits[record.codec]), "trusted": record.kl_mean <= limits[record.codec]}
        for record in records
    ]
    return found


def by_rung(holdings: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is stored at each fidelity, over all models and bands, from the best rung down."""
    sums: dict[str, dict[str, int]] = {}
    for holding in holdings:
        held = sums.setdefault(holding["fidelity"], dict.fromkeys(("chunks", "tokens", "bytes", "raw_bytes"), 0))
        for name in held:
            held[name] += int(holding[name])
    return [
        {"fidelity": rung, **sums[rung], "ratio": sums[rung]["raw_bytes"] / max(1, sums[rung]["bytes"])}
        for rung in RUNGS
        if rung in sums
    ]


def measure(config: Config) -> dict[str, Any]:
    """Lets the running worker calibrate and measure every rung on its model; returns what it found.

    Raises `MemoryCommandError` when nothing runs, or when the worker cannot.
    """
    state = running_state(config.home)
    if not state:
        raise MemoryCommandError(
            f"nothing runs on {config.home}: the model measures itself. Start it with `kvloop up`, then run this again"
        )
    try:
        answer = httpx.post(f"{state['worker']}/v1/kv/measure", json={}, timeout=MEASURE_SECONDS)
    except httpx.HTTPError as error:
        raise MemoryCommandError(
            f"the worker at {state['worker']} did not answer ({error or type(error).__name__}): see `kvloop status`"
        ) from error
    if answer.status_code != 200:
        raise MemoryCommandError(f"the worker could not measure: {_message(answer)}")
    told: dict[str, Any] = answer.json()
    return told


def clear(config: Config) -> dict[str, int]:
    """Deletes every chunk of every tier; measured records and keys stay. Returns what was deleted.

    Raises `MemoryCommandError` while kvloop runs: a worker holds KV in its own memory too.
    """
    folder = _folder(config)
    try:
        with only_one(config.home):
            if not folder.is_dir():
                return {"chunks": 0, "tokens": 0, "bytes": 0}
            with KVStore(_quiet(config.worker.kv), folder) as store:
                holdings = store.report()
                store.clear()
    except SupervisorError:
        raise MemoryCommandError(
            f"kvloop runs on {config.home}, and its worker holds KV in RAM as well: stop it first (Ctrl-C), then clear"
        ) from None
    return {name: sum(getattr(each, name) for each in holdings) for name in ("chunks", "tokens", "bytes")}


def _folder(config: Config) -> Path:
    folder = config.worker.kv_folder
    assert folder is not None, "every configuration has a KV folder below its home"
    return folder


def _quiet(settings: KVSettings) -> KVSettings:
    """For a look at the folder: no upkeep of its own, no RAM, and no budget that would evict what a worker with other
    settings keeps."""
    return settings.model_copy(
        update={"upkeep_seconds": 0.0, "ram_bytes": 0, "disk_bytes": _UNBOUNDED, "remote_bytes": _UNBOUNDED}
    )


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return None if value == float("inf") else value


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.text[:300]}"
