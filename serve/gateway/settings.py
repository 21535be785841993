"""Settings of the gateway. A gateway without API keys never listens beyond this machine."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from typing import Self

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
