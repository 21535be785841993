"""Content digests of weights. A weights id names what is computed, never where it lies or what it is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

VOLATILE_CONFIG_KEYS = frozenset({"_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype"})
VOLATILE_ADAPTER_KEYS = frozenset(
    {"base_model_name_or_path", "inference_mode", "peft_version", "revision", "auto_mapping", "runtime_config"}
)


def base_weights_id(model_dir: Path) -> str:
    """Returns 64 hex digits over the safetensors files of `model_dir`, in the order of their names, and its config.

    Two folders with the same files have the same id wherever they lie. Raises `FileNotFoundError` without them.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{model_dir} has no *.safetensors")
    return _digest("base", files, _config(model_dir / "config.json", VOLATILE_CONFIG_KEYS))


def adapter_digest(adapter_dir: Path) -> str:
    """Returns 64 hex digits over an adapter's tensors and the part of its config that changes what is computed.

    Raises `FileNotFoundError` when `adapter_model.safetensors` or `adapter_config.json` is missing.
    """
    config = _config(adapter_dir / "adapter_config.json", VOLATILE_ADAPTER_KEYS)
    return _digest("adapter", [adapter_dir / "adapter_model.safetensors"], config)


def weights_id(base: str, adapter: str | None = None) -> str:
    """Returns the id of a base model alone or with an adapter, from their digests."""
    return base if adapter is None else f"{base}+{adapter}"


def _config(path: Path, volatile: frozenset[str]) -> bytes:
    loaded: dict[str, Any] = json.loads(path.read_text())
    kept = {key: value for key, value in loaded.items() if key not in volatile}
    if isinstance(kept.get("target_modules"), list):
        kept["target_modules"] = sorted(kept["target_modules"])  # a set, saved in no fixed order
    return json.dumps(kept, sort_keys=True).encode()


def _digest(kind: str, files: list[Path], config: bytes) -> str:
    total = blake3(f"kvloop weights 1 {kind}".encode())
    for part in (blake3(config).digest(), *(_file_digest(path) for path in files)):
        total.update(part)
    return total.hexdigest()


def _file_digest(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    return blake3().update_mmap(path).digest()
