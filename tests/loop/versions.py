"""Registered versions without weights: for what only reads their names and manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelines.registry import Registry


def adapter_folder(folder: Path, digest: str, **manifest: Any) -> Path:
    """An adapter folder that holds a manifest and nothing else."""
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "adapter_digest": digest, **manifest}))
    return folder


def register(registry: Registry, folder: Path, digest: str, verdict: str = "pass", **tags: str) -> str:
    """Registers such a folder; returns the version's number."""
    adapter = adapter_folder(folder, digest)
    all_tags = {"verdict": verdict, **tags}
    return registry.register(adapter, {"adapter_digest": digest}, {}, None, f"run_{digest[:8]}", all_tags)
