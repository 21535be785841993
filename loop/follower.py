"""Makes serving follow MLflow's `champion` alias, whoever moved it.

MLflow has no alias events without its server, so the alias is polled. The gateway does the work (load, prove, flip)
and is idempotent: the follower holds no state that a restart could lose. A version the gateway refuses is reported
once and tried again later, while the old one goes on serving.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loop.config import Config
from memory.journal import Journal
from pipelines.registry import CHAMPION, PREVIOUS, Registry, RegistryError, Version

ACTIVATE_SECONDS = 180.0
REFUSED_RETRY_SECONDS = 30.0
BASE = "base"
MLFLOW_USER = "mlflow"
log = logging.getLogger("kvloop.follower")


@dataclass(frozen=True)
class Wanted:
    """What the alias asks for: the body of the gateway's activate call. Without a version it is the base model."""

    version: Version | None
    name: str
    path: str | None

    @property
    def number(self) -> str | None:
        """The version's number; None is the base model."""
        return self.version.number if self.version else None

    def stale_kl(self, before: str) -> float | None:
        """What serving this on KV of the version with the serving name `before` costs, if its evaluation says so."""
        return self.version.stale_kl(number_of(before)) if self.version else None


def wanted_by(registry: Registry) -> Wanted:
    """Reads the alias. A version's serving name holds its number and its adapter's digest, so it is never reused."""
    number = registry.get_alias(CHAMPION)
    if number is None:
        return Wanted(None, BASE, None)
    version = registry.get_version(number)
    return Wanted(version, serving_name(number, version.path), str(version.path))


def serving_name(number: str, adapter: Path) -> str:
    """`v3-1a2b3c4d`. Raises `RegistryError` when the version has no readable manifest."""
    try:
        digest = json.loads((adapter / "manifest.json").read_text())["adapter_digest"]
        return f"v{number}-{digest[:8]}"
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RegistryError(f"version {number} has no readable manifest.json in {adapter}: {error!r}") from error


def number_of(name: str) -> str:
    """The version's number in a serving name; the base model's name stays."""
    return name.removeprefix("v").partition("-")[0]


class Follower:
    """Polls the alias and tells the gateway. Used by one thread."""

    def __init__(self, registry: Registry, journal: Journal, gateway_url: str, admin_token: str) -> None:
        self._registry = registry
        self._journal = journal
        self._client = httpx.Client(
            base_url=gateway_url, headers={"Authorization": f"Bearer {admin_token}"}, timeout=ACTIVATE_SECONDS
        )
        self._refused: tuple[str, float] | None = None

    def close(self) -> None:
        self._client.close()

    def step(self) -> str | None:
        """Looks once; returns the name of the version that now serves if this call changed it.

        Raises `RegistryError` and `httpx.HTTPError` when MLflow or the gateway cannot be asked.
        """
        wanted = wanted_by(self._registry)
        before, path = self._serving()
        if (before, path) == (wanted.name, wanted.path):
            self._refused = None
            return None
        if self._refused_lately(wanted.name):
            return None
        activation = self._activation(wanted, before)
        answer = self._client.post("/internal/versions/activate", json=activation)
        if answer.status_code == 409:
            self._refused = (wanted.name, time.monotonic())
            log.error("%s is refused, the old version goes on serving: %s", wanted.name, _message(answer))
            return None
        answer.raise_for_status()
        self._refused = None
        if before == wanted.name:
            return None
        if activation["who"] == MLFLOW_USER:
            self._remember_previous(before)
        log.info("%s serves", wanted.name)
        return wanted.name

    def _serving(self) -> tuple[str, str | None]:
        """Name and adapter folder of what serves; a folder that is not the alias's is that of a home since moved."""
        answer = self._client.get("/internal/versions")
        answer.raise_for_status()
        told = answer.json()
        paths = {version["name"]: version["path"] for version in told["versions"]}
        return told["serving"], paths.get(told["serving"])

    def _refused_lately(self, name: str) -> bool:
        return self._refused is not None and (
            self._refused[0] == name and time.monotonic() - self._refused[1] < REFUSED_RETRY_SECONDS
        )

    def _activation(self, wanted: Wanted, before: str) -> dict[str, Any]:
        asked = {"name": wanted.name, "path": wanted.path, "version": wanted.number, **self._who_moved(wanted)}
        stale_kl = wanted.stale_kl(before)
        return asked if stale_kl is None else asked | {"stale_kl": stale_kl}

    def _who_moved(self, wanted: Wanted) -> dict[str, Any]:
        """Who moved the alias and why, if kvloop did (it writes that down before it moves it); else MLflow's user."""
        followed = -math.inf  # when serving began to follow the move before this one: what is older is not this move
        for entry in self._journal.list_promotions(limit=20):
            if entry.action == "follow":
                followed = max(followed, entry.at - (entry.seconds or 0.0))
            elif entry.at < followed:
                break
            elif entry.to_version == (wanted.number or BASE):
                return {"who": entry.who, "reason": entry.reason, "report": entry.report, "action": "follow"}
        return {"who": MLFLOW_USER, "reason": "the champion alias was moved in MLflow", "action": "follow"}

    def _remember_previous(self, before: str) -> None:
        """Who moves `champion` in MLflow moves nothing else; `kvloop rollback` must still find what served before."""
        if before == BASE:
            self._registry.delete_alias(PREVIOUS)
        else:
            self._registry.set_alias(PREVIOUS, number_of(before))


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError):
        return answer.text[:300]


def main() -> None:
    """The follower's process: steps until SIGTERM."""
    arguments = argparse.ArgumentParser(prog="python -m loop.follower")
    arguments.add_argument("--config-file", type=Path, required=True)
    config = Config.model_validate_json(arguments.parse_args().config_file.read_text())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    journal = Journal.open(config.journal.url, config.journal)
    follower = Follower(
        Registry(config.registry),
        journal,
        f"http://{config.gateway.host}:{config.gateway.port}",
        (config.home / "admin-token").read_text().strip(),
    )
    trouble = ""
    while not stop.is_set():
        try:
            follower.step()
            trouble = ""
        except (RegistryError, httpx.HTTPError) as error:
            if str(error) != trouble:  # said once, not twice a second
                trouble = str(error)
                log.warning("cannot follow now, trying on: %s", trouble)
        stop.wait(config.follow_seconds)
    follower.close()
    journal.close()


if __name__ == "__main__":
    main()
