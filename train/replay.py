"""What the base model says of its own accord: the anchor that keeps a trained model from forgetting.

No outside data is needed. Once per base weights, raw texts are sampled from the model (from the openings of
texts of many kinds) and chat questions are answered greedily; kept are the token ids and, at each position that
counts, the base's distribution as its most likely tokens, all others being one bucket. The file is named after
everything it depends on, so another base, template or size samples anew.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load, save

from memory.files import write_atomic
from train.decoder import Decoder
from train.packing import Row, pack_rows

TOP = 64
"""Most likely tokens kept at each position."""

_FORMAT = "1"
_BATCH = 64
_PACK_TOKENS = 1024
_SAMPLING_SEED = 0
# A small model at temperature 1 soon leaves what anyone would write; the anchor should be text like real text.
_SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": TOP, "top_p": 1.0}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplaySize:
    """How much is sampled: rows of each kind, and tokens sampled per row."""

    raw_rows: int
    raw_tokens: int
    chat_rows: int
    chat_tokens: int


@dataclass(frozen=True)
class ReplaySet:
    """Replay rows with the base's distributions.

    `top_ids` int64 and `top_logprobs` float32, both [targets, TOP], lie at a row's `Row.replay` index.
    """

    raw: tuple[Row, ...]
    chat: tuple[Row, ...]
    top_ids: tuple[torch.Tensor, ...]
    top_logprobs: tuple[torch.Tensor, ...]


def replay_set(model: Any, tokenizer: Any, weights_id: str, size: ReplaySize, folder: Path) -> ReplaySet:
    """Reads the replay set of these base weights from `folder`, or samples it there first (under a minute for 135M).

    `model` is the base without an adapter. A file that does not read back whole is replaced.
    """
    template = str(getattr(tokenizer, "chat_template", None))
    identity = json.dumps([_FORMAT, weights_id, template, TOP, vars(size), _prompts(), _SAMPLING], sort_keys=True)
    path = folder / f"replay-{blake3(identity.encode()).hexdigest(32)[:32]}.safetensors"
    if path.is_file():
        try:
            return _from_tensors(load(path.read_bytes()))
        except (SafetensorError, KeyError, ValueError) as error:
            _log.warning("replay set %s is damaged (%s); sampling it again", path.name, error)
    tensors = _sample(model, tokenizer, size)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, save(tensors))
    return _from_tensors(tensors)


def _prompts() -> dict[str, list[str]]:
    text = resources.files("train").joinpath("replay_prompts.json").read_text(encoding="utf-8")
    return {name: list(lines) for name, lines in json.loads(text).items()}


def _sample(model: Any, tokenizer: Any, size: ReplaySize) -> dict[str, torch.Tensor]:
    prompts = _prompts()
    openings = [prompts["starts"][index % len(prompts["starts"])] for index in range(size.raw_rows)]
    questions = [prompts["questions"][index % len(prompts["questions"])] for index in range(size.chat_rows)]
    starts = [tokenizer.encode(opening, add_special_tokens=False) for opening in openings]
    chats = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )
        for question in questions
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SAMPLING_SEED)
        raw = _generate(model, starts, size.raw_tokens, sample=True)
        chat = _generate(model, chats, size.chat_tokens, sample=False)
    rows = [Row(ids, 1, index) for index, ids in enumerate(raw)]
    for ids, prompt in zip(chat, chats, strict=True):
        rows.append(Row(ids, len(prompt), len(rows)))
    rows = [row for row in rows if row.targets > 0]
    top_ids, top_logprobs = _distributions(model, rows)
    return {
        "token_ids": torch.from_numpy(np.concatenate([row.token_ids for row in rows])),
        "lengths": torch.tensor([len(row.token_ids) for row in rows]),
        "completion_starts": torch.tensor([row.completion_start for row in rows]),
        "is_chat": torch.tensor([int(row.completion_start > 1) for row in rows]),
        "top_ids": top_ids.int(),
        "top_logprobs": top_logprobs,
    }


@torch.no_grad()
def _generate(model: Any, prompts: Sequence[Sequence[int]], tokens: int, *, sample: bool) -> list[np.ndarray[Any, Any]]:
    """int64 ids of each prompt and up to `tokens` more; ends after the first end token."""
    ends = model.generation_config.eos_token_id
    end_ids = set(ends if isinstance(ends, list) else [ends])
    results: list[np.ndarray[Any, Any]] = []
    for begin in range(0, len(prompts), _BATCH):
        batch = prompts[begin : begin + _BATCH]
        width = max(len(prompt) for prompt in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros(len(batch), width, dtype=torch.int64)
        for line, prompt in enumerate(batch):
            ids[line, width - len(prompt) :] = torch.tensor(prompt)
            mask[line, width - len(prompt) :] = 1
        how = _SAMPLING if sample else {"do_sample": False}
        output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, pad_token_id=0, **how)
        for prompt, line in zip(batch, output[:, width:].tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(line) if token in end_ids), len(line))
            results.append(np.array([*prompt, *line[:end]], dtype=np.int64))
    return results


@torch.no_grad()
def _distributions(model: Any, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """The base's TOP most likely tokens at every position that counts: ids and log-probs, both [positions, TOP]."""
    decoder = Decoder(model, 0)
    ids: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    for pack in pack_rows(rows, _PACK_TOKENS):
        states = decoder.hidden(pack)
        for index in range(len(pack.rows)):
            logprobs_here = decoder.logits(states[pack.target_positions(index)]).log_softmax(-1)
            top = logprobs_here.topk(min(TOP, logprobs_here.shape[-1]))
            ids.append(top.indices)
            logprobs.append(top.values)
    return torch.cat(ids), torch.cat(logprobs)


def _from_tensors(tensors: dict[str, torch.Tensor]) -> ReplaySet:
    """Raises `KeyError` or `ValueError` when the tensors do not fit together."""
    lengths = tensors["lengths"].tolist()
    starts = tensors["completion_starts"].tolist()
    token_ids = np.split(tensors["token_ids"].numpy(), np.cumsum(lengths)[:-1])
    rows = [Row(ids, start, index) for index, (ids, start) in enumerate(zip(token_ids, starts, strict=True))]
    targets = [row.targets for row in rows]
    if sum(targets) != len(tensors["top_ids"]) or sum(targets) != len(tensors["top_logprobs"]):
        raise ValueError("its distributions do not match its tokens")
    is_chat = tensors["is_chat"].tolist()
    return ReplaySet(
        raw=tuple(row for row, chat in zip(rows, is_chat, strict=True) if not chat),
        chat=tuple(row for row, chat in zip(rows, is_chat, strict=True) if chat),
        top_ids=torch.split(tensors["top_ids"].long(), targets),
        top_logprobs=torch.split(tensors["top_logprobs"].float(), targets),
    )
