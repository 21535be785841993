"""What a worker is told: an engine, and where it listens."""

from __future__ import annotations

from pydantic import Field

from serve.engine.settings import EngineSettings


class WorkerSettings(EngineSettings):
    """Settings of one worker process. It has no keys of its own: it listens for gateways, not for clients."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8101, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    max_prompts: int = Field(default=1024, ge=1)
    """Most prompts in one request."""
