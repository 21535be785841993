"""Settings of the gateway. A gateway without API keys never listens beyond this machine."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memory.journal.settings import JournalSettings


class GatewaySettings(BaseModel):
    """What the gateway needs to know; everything else it learns from its workers and the journal."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    journal: JournalSettings
    """The journal's settings."""
    model_dir: Path
    """Folder of the base model; only its tokenizer, chat template and configuration are read."""
    workers: tuple[str, ...] = Field(min_length=1)
    """Base URLs of the workers, for example `http://127.0.0.1:8101`."""
    secret_file: Path
    """File with the secret that separates the tenants' KV memory; at least 16 bytes."""
    host: str = "127.0.0.1"
    """Address to listen on. Without `keys_file` only a loopback address is accepted."""
    port: int = Field(default=8100, ge=0, le=65535)
    """Port to listen on."""
    keys_file: Path | None = None
    """JSON object of API key to tenant name. Without it there is one tenant, `default`."""
    admin_token_file: Path | None = None
    """File with the token that opens `/internal`; without it those routes do not exist."""
    served_name: str = "kvloop"
    """Model name that always means the version being served."""
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    """Largest accepted request body."""
    max_choices: int = Field(default=16, ge=1)
    """Largest accepted `n`."""
    default_max_tokens: int = Field(default=1024, ge=1)
    """Longest answer where a request names no limit; less where the context has less room."""
    max_stop_strings: int = Field(default=16, ge=1)
    """Most stop strings a request may name."""
    worker_wait_seconds: float = Field(default=60.0, ge=0)
    """How long a request waits for a worker that is down before it is answered with 503."""
    worker_poll_seconds: float = Field(default=0.25, gt=0)
    """Pause between two looks at a worker that is down."""
    worker_read_seconds: float = Field(default=600.0, gt=0)
    """Longest silence of a worker within one request before it counts as down."""
    load_seconds: float = Field(default=120.0, gt=0)
    """Longest time a worker may take to load an adapter."""
    shutdown_seconds: int = Field(default=30, ge=0)
    """How long a stopping gateway lets the streams in flight finish."""
    journal_threads: int = Field(default=8, ge=1)
    """Threads that wait for the journal, so that the event loop never does."""
    session_ttl_seconds: float | None = Field(default=None, gt=0)
    """After this long a session is deleted with everything said in it, unless it was created with a time of its own.
    Without it sessions last until they are deleted."""
    sweep_seconds: float = Field(default=30.0, gt=0)
    """Pause between two looks for sessions and memories whose time is over. They are not shown from the moment it is;
    within this pause they are deleted."""
    memory_delete_seconds: float = Field(default=30.0, ge=0)
    """How long deleting a memory waits for turns that use it before it is answered with 409."""
    kv_policy: Literal["refresh", "reuse"] = "refresh"
    """What a session meets whose version is no longer the one served. `refresh`: it stays on its version until its KV
    is computed under the new one, or `pin_seconds` have passed. `reuse`: it moves at once and reuses the KV of the
    version before, where the evaluation measured that this costs less than `reuse_max_kl`; else as `refresh`."""
    reuse_max_kl: float = Field(default=0.01, ge=0)
    """Under policy `reuse`, the largest mean KL divergence (nats a token) of answers over the old version's KV."""
    pin_seconds: float = Field(default=600.0, ge=0)
    """A session used within this time before a change of version stays on its version for up to as long after it."""
    refresh: bool = True
    """Whether sessions' KV is computed under the new version in the background."""
    refresh_sessions: int = Field(default=2000, ge=0)
    """Most sessions that are queued at a change of version; the ones used last are taken."""
    refresh_days: float = Field(default=30.0, gt=0)
    """A session that was not used for so many days is not refreshed."""
    refresh_running: int = Field(default=0, ge=0)
    """Background work begins while no worker runs more requests than this, and none waits."""
    refresh_pause_seconds: float = Field(default=0.1, gt=0)
    """Pause between two refreshes, and between two looks whether the workers have time."""

    @model_validator(mode="after")
    def _only_loopback_without_keys(self) -> Self:
        if self.keys_file is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is reachable from other machines, and no API keys are configured: "
                "set keys_file, or listen on 127.0.0.1"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address, without port) can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load_settings(path: Path) -> GatewaySettings:
    """Reads a settings file (JSON). Raises `ValueError` (pydantic's included) naming what is wrong."""
    return GatewaySettings.model_validate(json.loads(path.read_text()))
