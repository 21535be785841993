"""Scores base, champion and candidate on the same examples, through a worker as a client would.

Invariants: every model sees the same examples; adapters are loaded under names never used before and are unloaded
again, and a worker started here is stopped, also when something fails; scores kept from before are used only when
examples, weights, tokenizer and program are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, model_validator

from evals.errors import EvalError
from evals.kept import KeptScores
from evals.results import EvalResult, Example, ModelScores, StaleKV, SuiteScores
from evals.scorer import ModelScorer
from evals.settings import EvalSettings
from evals.stale import Conversation, Probes, build_probes, measure
from evals.suites.base import Advance, ExampleScore, Suite
from evals.suites.catalog import build_suites
from evals.suites.heldout import HeldOut
from evals.suites.perplexity import Perplexity
from evals.worker_process import own_worker
from serve.backends.base import NotSupported, WorkerError
from serve.backends.client import CompletionsClient
from serve.gateway.text import TextCodec

_log = logging.getLogger(__name__)


class EvalModel(BaseModel):
    """A version to score: its name in reports, and its adapter folder."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """Name in results and reports."""
    adapter: Path
    """PEFT adapter folder."""


class EvalJob(BaseModel):
    """One evaluation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model_dir: Path
    """Folder of the base model: its tokenizer and template, and its weights where no worker is given."""
    heldout: Path
    """JSONL file of the eval-split demonstrations."""
    candidate: EvalModel
    """The version to judge."""
    champion: EvalModel | None = None
    """The version that serves; the base model when empty."""
    base_name: str = "base"
    """Name of the base model in results, and in requests to a given worker."""
    worker_url: str | None = None
    """A running worker to ask; when empty, one is started and stopped again."""
    kept_folder: Path | None = None
    """Where scores are kept between evaluations; nothing is kept when empty."""
    reuse_max_kl: float = 0.0
    """Mean KL below which KV of the champion may be served under the candidate; nothing is below 0."""
    settings: EvalSettings = EvalSettings()
    """How much is asked."""

    @model_validator(mode="after")
    def _names_differ(self) -> EvalJob:
        names = [self.base_name, self.candidate.name, *([self.champion.name] if self.champion else [])]
        if len(set(names)) != len(names):
            raise ValueError(f"base, champion and candidate need different names, not {names}")
        return self


@dataclass(frozen=True)
class Progress:
    """How far an evaluation is: prompts done of all, and which model is asked by which suite now."""

    done: int
    total: int
    model: str
    suite: str


OnProgress = Callable[[Progress], None]


def evaluate(job: EvalJob, on_progress: OnProgress | None = None) -> EvalResult:
    """Scores the job's models; blocks. `on_progress` is called in this thread.

    Raises `EvalDataError` for unusable files, `WorkerStartFailed` when its own worker does not start, and the
    client's `WorkerError`s when a worker fails or refuses an adapter.
    """
    text = TextCodec(job.model_dir)
    target, guards = build_suites(text, job.heldout, job.settings, text.context_length)
    suites: list[Suite] = [target, *guards]
    left_out = {"heldout_too_long": target.too_long}
    probes = _probes(text, target, guards, job.settings)
    with contextlib.ExitStack() as stack:
        url = job.worker_url
        if url is None:
            url = stack.enter_context(own_worker(job.model_dir, job.base_name, job.settings))
        return asyncio.run(_Evaluation(job, text, suites, probes, on_progress).run(url, left_out))


class _Evaluation:
    def __init__(
        self, job: EvalJob, text: TextCodec, suites: list[Suite], probes: Probes, on_progress: OnProgress | None
    ) -> None:
        self._job = job
        self._text = text
        self._suites = suites
        self._probes = probes
        self._on_progress = on_progress
        self._models = [None, *filter(None, [job.champion]), job.candidate]
        self._total = len(self._models) * sum(suite.prompts for suite in suites)
        self._done = 0
        own = f"own {job.settings.dtype}" if job.worker_url is None else "given"
        self._kept = KeptScores(job.kept_folder, text.digest, f"{own} {_version('kvloop')}")

    async def run(self, url: str, left_out: dict[str, int]) -> EvalResult:
        started, clock = time.time(), time.monotonic()
        async with CompletionsClient(url) as client:
            scored = [await self._score(client, model) for model in self._models]
            stale = await self._stale(client)
        return EvalResult(
            base=self._job.base_name,
            champion=self._job.champion.name if self._job.champion else self._job.base_name,
            candidate=self._job.candidate.name,
            models=scored,
            settings=self._job.settings,
            versions={name: _version(name) for name in ("kvloop", "torch", "numpy", "tokenizers")}
            | {"python": platform.python_version()},
            left_out=left_out,
            started_at=started,
            seconds=time.monotonic() - clock,
            stale_kv=stale,
        )

    async def _stale(self, client: CompletionsClient) -> StaleKV | None:
        """None where there are no probes, and for a worker that cannot tell, which a log line says."""
        if not self._probes:
            return None
        job = self._job
        champion = job.champion.name if job.champion else job.base_name
        if self._on_progress is not None:
            self._on_progress(Progress(self._done, self._total, job.candidate.name, "stale KV"))
        async with (
            _loaded(client, job.base_name, job.champion) as before,
            _loaded(client, job.base_name, job.candidate) as after,
        ):
            try:
                return await measure(
                    client,
                    self._probes,
                    candidate=after,
                    champion=before,
                    names=(job.candidate.name, champion),
                    threshold=job.reuse_max_kl,
                )
            except NotSupported as error:
                _log.warning("what stale KV costs was not measured: %s", error)
                return None

    async def _score(self, client: CompletionsClient, model: EvalModel | None) -> ModelScores:
        clock = time.monotonic()
        async with _loaded(client, self._job.base_name, model) as served:
            weights_id = await _weights_id(client, served)
            name = model.name if model else self._job.base_name
            scorer = ModelScorer(client, served, self._text.vocabulary.decode, self._job.settings)
            scores, reused = [], []
            for suite in self._suites:
                kept = self._kept.load(suite, weights_id)
                if kept is not None:
                    reused.append(suite.name)
                    self._advance(name, suite)(suite.prompts)
                else:
                    kept = _suite_scores(suite, await suite.score(scorer, self._advance(name, suite)))
                    self._kept.save(suite, weights_id, kept)
                scores.append(kept)
        return ModelScores(
            name=name,
            adapter=str(model.adapter) if model else None,
            weights_id=weights_id,
            suites=scores,
            reused=reused,
            prompt_tokens=scorer.prompt_tokens,
            generated_tokens=scorer.generated_tokens,
            seconds=time.monotonic() - clock,
        )

    def _advance(self, model: str, suite: Suite) -> Advance:
        def advance(prompts: int) -> None:
            self._done += prompts
            if self._on_progress is not None:
                self._on_progress(Progress(self._done, self._total, model, suite.name))

        return advance


def _probes(text: TextCodec, target: HeldOut, guards: list[Suite], settings: EvalSettings) -> Probes:
    conversations = [Conversation(messages, answer) for messages, answer in target.conversations]
    texts = [ids for guard in guards if isinstance(guard, Perplexity) for ids in guard.token_ids]
    return build_probes(text, conversations, texts, settings.stale_probes, text.context_length)


@contextlib.asynccontextmanager
async def _loaded(client: CompletionsClient, base: str, model: EvalModel | None) -> AsyncIterator[str]:
    """The name under which the worker serves `model` within the context."""
    if model is None:
        yield base
        return
    name = f"eval-{secrets.token_hex(8)}"
    await client.load_adapter(name, str(model.adapter.resolve()))
    try:
        yield name
    finally:
        # A worker that is gone took its adapters along; that must not hide why it is gone.
        try:
            await client.unload_adapter(name)
        except WorkerError as error:
            _log.warning("the adapter %s could not be unloaded: %s", name, error)


async def _weights_id(client: CompletionsClient, served: str) -> str | None:
    models = {model.id: model for model in await client.models()}
    if served not in models:
        raise EvalError(f"the worker serves {', '.join(sorted(models))}, but not {served}; give the right base_name")
    return models[served].weights_id


def _suite_scores(suite: Suite, scores: list[ExampleScore]) -> SuiteScores:
    return SuiteScores(
        suite=suite.name,
        role=suite.role,
        kind=suite.kind,
        unit=suite.unit,
        secondary_name=suite.secondary,
        digest=suite.digest,
        examples=[
            Example(
                id=each.id, cluster=each.cluster, score=each.score, secondary=each.secondary, details=dict(each.details)
            )
            for each in scores
        ],
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
