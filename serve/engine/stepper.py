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
        self.lifted_tokens = 0
        self.background_tokens = 0
        self.generated_tokens = 0

    def execute(self, step: Step) -> None:
        """Computes `step` and advances its sequences."""
        began = time.monotonic()
        decoder = step.version.decoder
        prompts = [work for work in step.works if work.sequence.in_prompt]
        hidden = decoder.forward([_run(work) for work in step.works], step.first_layer)
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
        self._observe(step, prompts, time.monotonic() - began)
        if self._memory is not None:
            for work in prompts:
                if work.sequence.remaining:
                    self._memory.save_progress(work.sequence)
        if not complete:
            return
        logits = decoder.logits(hidden[rows])
        for sequence, its_logits in zip(complete, logits, strict=True):
            self._reply(sequence, its_logits)

    def _observe(self, step: Step, prompts: list[Work], seconds: float) -> None:
        """Tells the cost model how fast prompts are computed, from steps that did nothing else."""
        tokens = sum(work.count for work in prompts)
        if step.first_layer:
            self.lifted_tokens += tokens
        else:
            self.computed_tokens += tokens
        self.background_tokens += sum(work.count for work in prompts if work.sequence.job.background)
        if self._memory is None or len(prompts) != len(step.works) or len(prompts) != 1:
            return
        start = prompts[0].sequence.computed - tokens
        observe = self._memory.observe_lift if step.first_layer else self._memory.observe_prefill
        observe(tokens, seconds, start)

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
            other.begin_as(sequence)
            self._scheduler.start(other)
        for each in job.sequences:
            if job.max_tokens:
                self._draw(each, logits)
            else:
                self._finish(each, "length")
                self._end_if_all_finished(job)

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
    return Run(token_ids, sequence.computed, sequence.buffer.kv, sequence.buffer.entering)
