"""Time to the first token of the next turn of a 4,000-token session, in a fresh process, against other engines.

What is timed, the same for every engine: the process has loaded the model and computed something unrelated, so that
nothing is first-time; the clock starts when it is told to go on, and stops when the first token of the reply to a
message of about 20 tokens is known. In between it loads the session's KV from files (which lie in the page cache) and
computes the message. One compute thread. Engines take turns, each time in a new process; the figure is the median.

python -m benchmarks.memory.resume [--rounds 5] [--vllm]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.memory import peers
from benchmarks.memory.session import SESSION_TOKENS, Session, benchmark_model, load_session

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
VLLM_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PYTHONHASHSEED": "0",
}
OURS: dict[str, dict[str, Any]] = {
    "kvloop exact": {"codec": "exact"},
    "kvloop int8": {"codec": "int8"},
    "kvloop int4": {"codec": "int4"},
    "kvloop exact, not encrypted": {"codec": "exact", "encryption": False},
}
QUICK_TOKENS = 600
SAVE_SECONDS, RESUME_SECONDS = 900, 300
MARK = "PEER "


class PeerFailed(RuntimeError):
    """An engine's process ended without an answer."""


@dataclass
class Engine:
    """One row of the comparison."""

    name: str
    script: str
    python: Path
    config: dict[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    restored: int = 0
    failed: str = ""

    @property
    def is_ours(self) -> bool:
        return self.script == "peer_kvloop.py"

    @property
    def milliseconds(self) -> float | None:
        return statistics.median(self.times) if self.times and not self.failed else None


def engines(folder: Path, model: Path, session: Session, *, with_vllm: bool, quick: bool = False) -> list[Engine]:
    """All engines that can be run here; those that cannot have the reason in `failed`. `quick` leaves most out."""
    base: dict[str, Any] = {"model": str(model), "history": list(session.history), "turn": list(session.turn)}
    here = Path(sys.executable)

    def engine(name: str, script: str, python: Path, variables: Mapping[str, str], **more: Any) -> Engine:
        store = folder / name.replace(" ", "-").replace(",", "")
        store.mkdir(exist_ok=True)
        return Engine(name, script, python, base | {"store": str(store)} | more, variables)

    keyring = {"keyring": str(folder / "keyring")}
    found = [
        engine(name, "peer_kvloop.py", here, {"PYTHONPATH": str(ROOT)}, kv=keyring | settings)
        for name, settings in OURS.items()
        if not quick or name in ("kvloop exact", "kvloop int4")
    ]
    found.append(engine("Hugging Face torch.load", "peer_huggingface.py", here, {}, mmap=False))
    if quick:
        return found
    found.append(engine("Hugging Face torch.load(mmap)", "peer_huggingface.py", here, {}, mmap=True))
    optional: dict[str, tuple[str, Callable[[Path], peers.Environment], dict[str, str]]] = {
        "llama.cpp slot file": ("peer_llama.py", peers.llama_cpp, {})
    }
    if with_vllm:
        optional["vLLM ExampleConnector"] = ("peer_vllm.py", peers.vllm, VLLM_SETTINGS)
    for name, (script, install, variables) in optional.items():
        made = install(peers.FOLDER)
        row = engine(name, script, made.python or here, variables)
        row.failed = made.reason
        if script == "peer_llama.py" and made.python:
            try:
                row.config["gguf"] = str(peers.gguf())
            except peers.PeerError as error:
                row.failed = str(error)
        found.append(row)
    return found


def save(engine: Engine) -> None:
    """Lets the engine compute and store the session."""
    config = _config(engine)
    done = subprocess.run(
        [engine.python, HERE / engine.script, "save", config],
        env=_environment(engine),
        capture_output=True,
        text=True,
        timeout=SAVE_SECONDS,
    )
    if done.returncode or '"saved"' not in done.stdout:
        raise PeerFailed(_last_line(done.stderr))


def resume(engine: Engine) -> None:
    """Resumes the session in a new process, and notes the time."""
    command = [str(engine.python), str(HERE / engine.script), "resume", str(_config(engine))]
    log = Path(engine.config["store"]).with_suffix(".log")
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env=_environment(engine), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            _answer(process, log)
            reply = _answer(process, log, go=True)
        finally:
            process.kill()  # its answer is all that was wanted
    engine.restored = int(reply["restored"])
    if engine.is_ours and engine.restored < len(engine.config["history"]) // 2:
        raise PeerFailed(f"only {engine.restored} tokens were restored")
    engine.times.append(float(reply["ms"]))


def measure(rounds: int = 5, *, with_vllm: bool = False, quick: bool = False) -> dict[str, Any]:
    """The figures; times in milliseconds, None where an engine does not run here. `quick` is a smoke run."""
    model = benchmark_model()
    session = load_session(model, QUICK_TOKENS if quick else SESSION_TOKENS)
    with tempfile.TemporaryDirectory(prefix="kvloop-resume-") as folder:
        rows = engines(Path(folder), model, session, with_vllm=with_vllm, quick=quick)
        for row in rows:
            _attempt(row, save)
        for number in range(1 if quick else rounds):
            for place in range(len(rows)):
                _attempt(rows[(place + number) % len(rows)], resume)
    return figures(rows)


def figures(rows: list[Engine]) -> dict[str, Any]:
    """Medians, and how ours compare with the fastest of the others."""
    others = [row.milliseconds for row in rows if not row.is_ours and row.milliseconds is not None]
    best = min(others, default=None)
    found: dict[str, Any] = {
        "peers": {row.name: row.milliseconds for row in rows if not row.is_ours},
        "peers_missing": {row.name: row.failed for row in rows if row.failed},
        "resume_ms": {row.name: row.milliseconds for row in rows if row.is_ours},
        "resume_restored": {row.name: row.restored for row in rows},
    }
    for codec in ("exact", "int4"):
        ours = found["resume_ms"].get(f"kvloop {codec}")
        found[f"resume_over_best_peer_{codec}"] = ours / best if ours is not None and best is not None else None
    return found


def _attempt(engine: Engine, step: Callable[[Engine], None]) -> None:
    if engine.failed:
        return
    try:
        step(engine)
    except (OSError, PeerFailed, subprocess.SubprocessError) as error:
        engine.failed = f"{step.__name__}: {error}"


def _config(engine: Engine) -> Path:
    path = Path(engine.config["store"]).with_suffix(".json")
    path.write_text(json.dumps(engine.config))
    return path


def _environment(engine: Engine) -> dict[str, str]:
    return {**os.environ, **SETTINGS, **engine.variables}


def _answer(process: subprocess.Popen[str], log: Path, *, go: bool = False) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    if go:
        process.stdin.write("go\n")
        process.stdin.flush()
    for line in process.stdout:
        if line.startswith(MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return answer
    raise PeerFailed(_last_line(log.read_text()))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1][:300]


def main() -> None:
    """Measures and prints one line of JSON."""
    parser = argparse.ArgumentParser(description="next-turn time to first token after a restart")
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes of each engine")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too (3.5 GB to install)")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.rounds, with_vllm=arguments.vllm)))


if __name__ == "__main__":
    main()
