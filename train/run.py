"""The trainer process: `python -m train.run --job JOB.json --folder FOLDER`. `train.launch` starts it.

It fills FOLDER, which it was given empty but for its log, with a PEFT adapter, `metrics.json` and, last,
`manifest.json`; nothing outside FOLDER and the replay folder is written. It dies with its parent.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from memory.files import sync_folder, write_atomic
from train.events import EventPipe, Failed, Progress
from train.settings import TrainJob

METRICS = "metrics.json"
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


class NotFinite(ArithmeticError):
    """The loss is no number any more."""


class Stopped(SystemExit):
    """Asked to stop by a signal."""


def main() -> None:
    """Exit status 0: done. 1: failed, with the reason in the last event. 128 + n: stopped by signal n."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    signal.signal(signal.SIGTERM, _stop)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.captureWarnings(capture=True)
    events = EventPipe()
    try:
        _log.info("trainer %d started", os.getpid())
        job = TrainJob.model_validate_json(arguments.job.read_bytes())
        os.nice(job.settings.niceness)
        train(job, arguments.folder, events)
    except Stopped:
        events.send(Failed("stopped by a signal"))
        raise
    except Exception as error:  # noqa: BLE001 - the process's edge: the reason goes to the parent, the rest to the log
        _log.exception("training failed")
        events.send(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)


def train(job: TrainJob, folder: Path, events: EventPipe) -> None:
    """Trains the job's adapter into `folder`. Raises what recipes, rows and files raise."""
    from transformers import AutoTokenizer

    from train.rows import Variation, read_rows

    begin = time.monotonic()
    settings = job.settings
    tokenizer = AutoTokenizer.from_pretrained(job.model_dir)
    variation = Variation(settings.word_dropout, math.ceil(settings.epochs), settings.seed)
    read = read_rows(job.dataset, tokenizer, settings.max_row_tokens, variation)
    # Only a dataset that can be trained on is worth the seconds these take to import.
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    from serve.weights_id import adapter_digest, base_weights_id
    from train import manifest
    from train.recipes import make_recipe
    from train.recipes.base import Materials

    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=torch.bfloat16, use_safetensors=True)
    weights_id = base_weights_id(job.model_dir)
    _log.info("%d rows, base %s, recipe %s", len(read.rows), weights_id[:16], job.recipe)
    set_seed(settings.seed)
    recipe = make_recipe(job.recipe)
    history: list[dict[str, float]] = []
    trainer = recipe.trainer(
        Materials(
            model=model,
            tokenizer=tokenizer,
            rows=read.rows,
            settings=settings,
            base_weights_id=weights_id,
            replay_dir=job.replay_dir,
            work_dir=folder,
            callbacks=[_reporter(events, history)],
        )
    )
    trainer.train()
    trainer.model.eval()
    trainer.model.save_pretrained(folder, safe_serialization=True)
    metrics = {
        **_summary(history),
        "rows": len(read.rows),
        "rows_too_long": read.too_long,
        "train_seconds": round(time.monotonic() - begin, 2),
        "cpu_seconds": round(time.process_time(), 2),
    }
    write_atomic(folder / METRICS, json.dumps(metrics, indent=1).encode())
    _sync_files(folder)
    manifest.write_manifest(
        folder,
        manifest.Manifest(
            name=job.name,
            base_weights_id=weights_id,
            adapter_digest=adapter_digest(folder),
            tokenizer_digest=manifest.file_digest(job.model_dir / "tokenizer.json"),
            template_digest=manifest.template_digest(tokenizer),
            dataset_digest=manifest.file_digest(job.dataset),
            recipe=job.recipe,
            recipe_settings=settings.model_dump(mode="json"),
            seed=settings.seed,
            parents=list(job.parents),
            metrics=metrics,
            fingerprint=manifest.fingerprint(trainer.model, [variants[0] for variants in read.rows]),
            created_at=manifest.now(),
        ),
    )


def _reporter(events: EventPipe, history: list[dict[str, float]]) -> Any:
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):  # type: ignore[misc]
        """Sends each step's numbers, keeps them, and stops a run that has diverged."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **more: Any) -> None:
            if "loss" not in logs:
                return
            if not math.isfinite(logs["loss"]):
                raise NotFinite(f"the loss is {logs['loss']} at step {state.global_step}: lower learning_rate")
            history.append({name: logs[name] for name in ("loss", "kl") if name in logs})
            events.send(Progress(state.global_step, state.max_steps, logs["loss"], logs.get("kl")))

    return Reporter()


def _summary(history: list[dict[str, float]]) -> dict[str, float]:
    """Steps, and the mean loss and divergence over the last tenth of them."""
    last = history[-max(1, len(history) // 10) :]
    summary: dict[str, float] = {"steps": len(history)}
    for name in ("loss", "kl"):
        values = [step[name] for step in last if name in step]
        if values:
            summary[f"final_{name}"] = round(math.fsum(values) / len(values), 5)
    return summary


def _sync_files(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        sys.exit(1)


def _stop(number: int, frame: Any) -> NoReturn:
    raise Stopped(128 + number)


if __name__ == "__main__":
    main()
