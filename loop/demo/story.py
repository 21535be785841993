"""The demo's story, step by step. Every figure in its table was measured in the run that prints it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from evals.suites.base import read_json_lines
from evals.suites.perplexity import TEXTS
from loop.config import Config, load
from loop.demo.api import Answer, Api, in_parallel
from loop.demo.catalogue import Fact, load_catalogue
from loop.demo.errors import DemoError
from loop.demo.resume import Worker, measure
from loop.demo.table import show
from loop.demo.traffic import Traffic
from loop.follower import serving_name
from loop.processes import python_module
from loop.retrain_progress import retrain_with_progress
from memory.files import write_atomic
from pipelines.build import Judge, Trainer
from pipelines.registry import Registry
from pipelines.stages import Adapter, Event, Outcome
from serve.pull import pull
from train.dataset import HELDOUT, ROWS

MARK = "kvloop-demo"
QUESTIONS_PER_SESSION = 2
SWAP_REQUESTS = 240
SWAP_SECONDS = 120.0
START_SECONDS = 300.0
PLAIN_SFT_EPOCHS = 6.0
NOTES = 18  # so many of the bundled texts make a session of about 4,000 tokens
ANSWER_TOKENS = 32


@dataclass
class Measured:
    """What the run measured, under the keys of `--json`; None where this run did not measure it."""

    recall_before: float | None = None
    recall_after: float | None = None
    heldout_questions: int = 0
    perplexity_ratio: float | None = None
    guards_before: dict[str, float] = field(default_factory=dict)
    guards_after: dict[str, float] = field(default_factory=dict)
    gate_verdict: str | None = None
    gate_refused_plain_sft: bool | None = None
    history_tokens: int = 0
    ttft_cold_seconds: float | None = None
    ttft_warm_seconds: float | None = None
    ttft_restored_seconds: float | None = None
    ttft_restored_over_cold: float | None = None
    cached_tokens_honest: bool | None = None
    kv_bytes_per_token: float | None = None
    swap_requests: int = 0
    swap_failed: int = 0
    swap_mixed: int = 0
    swap_seconds: float | None = None
    decode_over_hf: float | None = None
    prefill_over_hf: float | None = None
    train_seconds: float | None = None
    total_seconds: float | None = None
    step_seconds: dict[str, float] = field(default_factory=dict)


class Story:
    """One run of the demo on a fresh home folder."""

    def __init__(self, config: Config, facts: Sequence[Fact], say: Console) -> None:
        self._config = config
        self._facts = facts
        self._say = say
        self.measured = Measured()
        self._api = Api(f"http://{config.gateway.host}:{config.gateway.port}")
        self._worker = Worker(config.home, f"http://{config.worker.host}:{config.worker.port}")
        self._version = ""
        self._dataset = Path()

    def tell(self) -> None:
        """Runs all steps against a kvloop that is up."""
        with self._step("ask what the model cannot know"):
            self.measured.recall_before = self._recall()
        with self._step("sessions, wrong answers, corrections"):
            self._converse()
        with self._step("a long session survives kill -9 of the worker"):
            self._resume()
        with self._step("compare with Hugging Face generate"):
            self._compare_engines()
        self._dataset = self._retrain_under_traffic()
        with self._step("ask again"):
            self.measured.recall_after = self._recall()

    def close(self) -> None:
        self._api.close()

    @contextmanager
    def _step(self, title: str) -> Iterator[None]:
        self._say.print(f"[bold]{title}[/bold]")
        began = time.monotonic()
        yield
        self.measured.step_seconds[title] = round(time.monotonic() - began, 1)

    def _recall(self) -> float:
        asked = [(fact, question) for fact in self._facts for question in fact.heldout]
        answers = self._api.ask_all([question for _, question in asked], ANSWER_TOKENS)
        right = [fact.answered_by(answer.text) for (fact, _), answer in zip(asked, answers, strict=True)]
        self.measured.heldout_questions = len(asked)
        self._example(asked[0][1], answers[0])
        self._say.print(f"  {sum(right)} of {len(right)} held-out questions answered rightly")
        return sum(right) / len(right)

    def _example(self, question: str, answer: Answer) -> None:
        text = " ".join(answer.text.split())
        self._say.print(f"  [dim]{question}[/dim]\n  [dim]{min(answer.models)}: {escape(text)}[/dim]")

    def _converse(self) -> None:
        """Each session asks about a few products and corrects the answers, as a support agent would."""
        asked = [
            (fact, phrasing)
            for number in range(len(self._facts[0].training))
            for fact in self._facts
            for phrasing in fact.training[number : number + 1]
        ]
        sessions = [
            asked[start : start + QUESTIONS_PER_SESSION] for start in range(0, len(asked), QUESTIONS_PER_SESSION)
        ]
        corrections = sum(in_parallel(self._one_session, list(enumerate(sessions))))
        self._say.print(f"  {len(sessions)} sessions, {corrections} corrections")

    def _one_session(self, numbered: tuple[int, Any]) -> int:
        number, questions = numbered
        session: str | None = None
        corrections = 0
        for fact, phrasing in questions:
            answer = self._api.ask(phrasing.question, session_id=session, max_tokens=ANSWER_TOKENS)
            session = answer.session_id
            if not fact.answered_by(answer.text):
                self._api.correct(answer.response_id, phrasing.answer, source=f"agent-{number % 6}")
                corrections += 1
        return corrections

    def _resume(self) -> None:
        texts = [row["text"] for row in read_json_lines(TEXTS)]
        resumed = measure(self._api, self._worker, texts[:NOTES])
        measured = self.measured
        measured.history_tokens = resumed.history_tokens
        measured.ttft_cold_seconds = resumed.cold
        measured.ttft_warm_seconds = resumed.warm
        measured.ttft_restored_seconds = resumed.restored
        measured.ttft_restored_over_cold = resumed.restored / resumed.cold
        measured.cached_tokens_honest = resumed.cached_tokens_honest
        measured.kv_bytes_per_token = self._worker.kv_bytes_per_token()
        self._say.print(
            f"  {resumed.history_tokens} tokens: first token after {resumed.cold:.2f} s cold, "
            f"{resumed.warm:.2f} s warm, {resumed.restored:.2f} s restored by a fresh process"
        )

    def _compare_engines(self) -> None:
        model = pull(self._config.model, self._config.home / "models")
        done = subprocess.run(
            python_module("evals.engine_speed", "--model", str(model)), capture_output=True, text=True
        )
        if done.returncode != 0:
            raise DemoError(f"the comparison with Hugging Face failed: {done.stderr[-800:]}")
        ratios = json.loads(done.stdout.splitlines()[-1])
        self.measured.decode_over_hf = ratios["decode_over_hf"]
        self.measured.prefill_over_hf = ratios["prefill_over_hf"]

    def _retrain_under_traffic(self) -> Path:
        """Retrains; clients start to ask before the alias moves and go on until the new version answers.

        Returns the folder of the dataset it trained on.
        """
        questions = [question for fact in self._facts for question in fact.heldout]
        traffic = Traffic(self._api, questions)
        moved_at = 0.0

        def on_event(event: Event) -> None:
            nonlocal moved_at
            if event.step == "register" and event.kind == "finished":
                traffic.start()
            elif event.step == "promote" and event.kind == "finished":
                moved_at = time.time()

        with self._step("retrain: curate, train, evaluate, gate, register"):
            outcome = retrain_with_progress(self._config, self._say, "demo", on_event=on_event)
        if outcome.version is None:
            raise DemoError(f"no version came out of the retrain: {outcome.summary()}")
        with self._step("swap under traffic"):
            self._version = serving_name(outcome.version, Registry(self._config.registry).version_path(outcome.version))
            if outcome.result == "promoted":
                traffic.wait_for(self._version, SWAP_REQUESTS, SWAP_SECONDS)
            report = traffic.stop()
        self._note_outcome(outcome)
        if outcome.result != "promoted":
            raise DemoError(f"the gate did not let the candidate pass: {outcome.summary()}")
        first = report.first_token_of(self._version)
        measured = self.measured
        measured.swap_requests, measured.swap_failed = report.requests, len(report.failures)
        measured.swap_mixed = report.mixed
        measured.swap_seconds = None if first is None else max(0.0, first - moved_at)
        for failure in report.failures[:3]:
            self._say.print(f"  [red]failed: {escape(failure)}[/red]")
        self._say.print(f"  {report.requests} requests, {len(report.failures)} failed, {report.mixed} mixed")
        return self._config.retrain.folder / outcome.run_id / "dataset"

    def _note_outcome(self, outcome: Outcome) -> None:
        """Takes the guards from the report the gate decided by."""
        report = json.loads((Path(outcome.report or "") / "report.json").read_text())
        self.measured.gate_verdict = outcome.verdict
        self.measured.train_seconds = outcome.seconds["train"]
        for step, seconds in outcome.seconds.items():
            self.measured.step_seconds[f"retrain: {step}"] = round(seconds, 1)
        summary = report["summary"]
        self.measured.guards_before = summary[report["result"]["base"]]
        self.measured.guards_after = summary[report["result"]["candidate"]]
        self.measured.perplexity_ratio = self.measured.guards_after["perplexity_ratio"]

    def refuse_plain_sft(self) -> None:
        """Trains plainly on the same data: it learns the facts, forgets the rest, and the gate must say no."""
        with self._step("a candidate that forgets meets the gate"):
            self._refuse_plain_sft(self._dataset)

    def _refuse_plain_sft(self, dataset: Path) -> None:
        config = self._config
        model_dir = pull(config.model, config.home / "models")
        folder = dataset.parent / "plain-sft"
        settings = config.train.model_copy(update={"epochs": PLAIN_SFT_EPOCHS})
        trained = Trainer(model_dir, "sft", settings, folder / "replay")(
            dataset=dataset / ROWS, out_dir=folder / "adapter", name="plain-sft", parents=(), advance=_quiet
        )
        judged = Judge(model_dir, config.evals, config.gate, config.retrain.folder / "shared" / "scores")(
            heldout=dataset / HELDOUT,
            candidate=Adapter(name="plain-sft", path=trained.adapter_dir),
            champion=None,
            out_dir=folder / "report",
            advance=_quiet,
        )
        self.measured.gate_refused_plain_sft = judged.verdict == "fail"
        self._say.print(f"  plain SFT: {judged.verdict}; " + "; ".join(judged.reasons))


def _quiet(done: float, total: float, detail: Mapping[str, Any]) -> None:
    """The side story shows no bars."""


def run(
    home: Path,
    overrides: Sequence[str],
    *,
    stay: bool,
    json_file: Path | None,
    plain_sft: bool,
    facts: int | None,
    say: Console,
) -> Measured:
    """Tells the story on a fresh `home`; leaves kvloop up at the end if `stay`. Raises `DemoError`."""
    home = home.expanduser().resolve()
    _fresh(home)
    config = load(overrides, home)
    began = time.monotonic()
    up = _start(config, overrides, say)
    story = Story(config, load_catalogue().facts[:facts], say)
    try:
        story.tell()
        measured = story.measured
        measured.total_seconds = time.monotonic() - began  # the side story is no part of the loop
        if plain_sft:
            story.refuse_plain_sft()
        show(measured, say)
        if json_file is not None:
            write_atomic(json_file, json.dumps(asdict(measured), indent=2).encode())
        if stay:
            say.print(f"\nThe API stays up at http://{config.gateway.host}:{config.gateway.port}/v1; Ctrl-C stops it.")
            up.wait()
        return measured
    except KeyboardInterrupt:
        return story.measured
    finally:
        story.close()
        if up.poll() is None:
            up.send_signal(signal.SIGINT)
            up.wait()


def _fresh(home: Path) -> None:
    """Empties a home that an earlier demo left; anything else is not touched."""
    mark = home / MARK
    if home.exists() and any(home.iterdir()):
        if not mark.exists():
            raise DemoError(f"{home} holds something that is no demo: choose another --home")
        for entry in home.iterdir():
            if entry.name not in (MARK, "models"):  # the converted model is the same in every run
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    home.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _start(config: Config, overrides: Sequence[str], say: Console) -> subprocess.Popen[bytes]:
    """Starts `kvloop up` as a user would, in a process of its own, and waits until the API answers."""
    options = [part for override in overrides for part in ("--set", override)]
    log = config.home / "up.log"
    with log.open("wb") as output, say.status("starting kvloop (the first start converts the model)"):
        up = subprocess.Popen(
            python_module("loop.cli", "--home", str(config.home), *options, "up"),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if up.poll() is not None:
                raise DemoError(f"kvloop up ended with code {up.returncode}: {log.read_text()[-2000:]}")
            if _both_answer(config):
                return up
            time.sleep(0.2)
    up.kill()
    raise DemoError(f"kvloop was not up after {START_SECONDS:.0f} s; see {log}")


def _both_answer(config: Config) -> bool:
    try:
        return all(
            httpx.get(f"http://{part.host}:{part.port}/health", timeout=5).status_code == 200
            for part in (config.gateway, config.worker)
        )
    except httpx.TransportError:
        return False
