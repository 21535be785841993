"""Computes one step and does what follows from it: scores prompts, draws tokens, ends sequences.

A sequence's KV is handed to memory before its last token is announced, so that a client who asks for the next turn
at once finds it there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from serve.engine.kv_memory import KVMemory
from serve.engine.model import Run
from serve.engine.request import DoneEvent, TokenEvent
from serve.engine.sampler import sample, token_logprobs
from serve.engine.scheduler import Scheduler, Step, Work
from serve.engine.sequence import Job, Sequence

SCORED_ROWS = 64  # rows of logits at a time: they stay near the cache, and memory within rows x vocabulary x 4 bytes


class Stepper:
    """Runs on the engine's thread. `end` is called with each job that has ended well."""

    def __init__(self, scheduler: Scheduler, memory: KVMemory | None, end: Callable[[Job], None]) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._end = end
        self.computed_tokens = 0
        self.generated_tokens = 0

    def execute(self, step: Step) -> None:
        """Computes `step` and advances its sequences."""
        began = time.monotonic()
        decoder = step.version.decoder
        hidden = decoder.forward([_run(work) for work in step.works])
        self._score_prompts(step, hidden)
        complete: list[Sequence] = []
        rows: list[int] = []
        row = -1
        for work in step.works:
            row += work.count
            work.sequence.computed += work.count
            if not work.sequence.remaining:
                complete.append(work.sequence)
                rows.append(row)
        self._observe(step, began)
        if not complete:
            return
        logits = decoder.logits(hidden[rows])
        for sequence, its_logits in zip(complete, logits, strict=True):
            self._reply(sequence, its_logits)

    def _observe(self, step: Step, began: float) -> None:
        """Tells the cost model how fast prompts are computed, from steps that did nothing else."""
        prompt_tokens = sum(work.count for work in step.works if work.sequence.generated == 0)
        self.computed_tokens += prompt_tokens
        if self._memory is not None and all(work.sequence.generated == 0 for work in step.works):
            self._memory.observe_prefill(prompt_tokens, time.monotonic() - began)

    def _score_prompts(self, step: Step, hidden: torch.Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow the tokens just computed."""
        rows: list[int] = []
        targets: list[int] = []
        counts: list[tuple[Job, int]] = []
        first = 0
        top = 0
        for work in step.works:
            sequence, job = work.sequence, work.sequence.job
            if job.scores_prompt and sequence.generated == 0:
                following = job.request.prompt[sequence.computed + 1 : sequence.computed + work.count + 1]
                rows += range(first, first + len(following))
                targets += following
                counts.append((job, len(following)))
                top = max(top, job.request.sampling.prompt_logprobs or 0)
            first += work.count
        scores = []
        for start in range(0, len(rows), SCORED_ROWS):
            part = slice(start, start + SCORED_ROWS)
            scores += token_logprobs(step.version.decoder.logits(hidden[rows[part]]), targets[part], top)
        at = 0
        for job, count in counts:
            wanted = job.request.sampling.prompt_logprobs or 0
            job.prompt_logprobs += [score.with_top(wanted) for score in scores[at : at + count]]
            at += count

    def _reply(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """Draws what follows a sequence whose tokens all have KV; after a prompt, for every choice of the job."""
        job = sequence.job
        if sequence.generated:
            self._draw(sequence, logits)
            return
        for other in job.sequences[1:]:
            self._copy_prompt(sequence, other)
        for each in job.sequences:
            if job.max_tokens:
                self._draw(each, logits)
            else:
                self._finish(each, "length")
                self._end_if_all_finished(job)

    def _copy_prompt(self, source: Sequence, target: Sequence) -> None:
        if source.buffer is None or target.buffer is None:
            raise RuntimeError("a running sequence has no KV buffer")
        target.buffer.kv[:, :, :, : source.computed] = source.buffer.kv[:, :, :, : source.computed]
        target.computed = source.computed
        self._scheduler.start(target)

    def _draw(self, sequence: Sequence, logits: torch.Tensor) -> None:
        job, sampling = sequence.job, sequence.job.request.sampling
        eos = () if sampling.ignore_eos else job.version.decoder.config.eos_ids
        ends = (*eos, *sampling.stop_token_ids)
        banned = ends if sequence.generated < sampling.min_tokens else ()
        token = sample(logits, sampling, sequence.generator, banned)
        logprob = None
        if sampling.logprobs is not None:
            logprob = token_logprobs(logits.unsqueeze(0), [token], sampling.logprobs)[0]
        first = job.first_token_at is None
        if first:
            job.first_token_at = time.monotonic()
        sequence.tokens.append(token)
        self.generated_tokens += 1
        stopped = token in ends
        reason = "stop" if stopped else "length" if sequence.generated >= job.max_tokens else None
        if reason is not None:
            self._finish(sequence, reason)
        stop_reason = token if stopped and token not in eos else None
        usage = job.usage() if first else None
        job.emit(TokenEvent(job.place, sequence.choice, token, logprob, reason, stop_reason, usage))
        if reason is not None:
            self._end_if_all_finished(job)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        if self._memory is not None:
            self._memory.save(sequence)
        self._scheduler.finish(sequence)

    def _end_if_all_finished(self, job: Job) -> None:
        if all(sequence.finish_reason for sequence in job.sequences):
            scores = tuple(job.prompt_logprobs) if job.scores_prompt else None
            self._end(job)
            job.emit(DoneEvent(job.place, job.usage(), scores))


def _run(work: Work) -> Run:
    sequence = work.sequence
    if sequence.buffer is None:
        raise RuntimeError("a running sequence has no KV buffer")
    token_ids = sequence.tokens[sequence.computed : sequence.computed + work.count]
    return Run(token_ids, sequence.computed, sequence.buffer.kv)
