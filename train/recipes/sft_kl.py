"""Supervised fine-tuning that does not forget: each step also replays what the base says of its own accord.

The loss is the completions' cross-entropy plus `kl_weight` times KL(base || model), both as means over tokens, the
latter over the base's most likely tokens and one bucket for all others, on raw and on chat replay rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from trl import SFTTrainer

from train.packing import Row
from train.recipes.base import Materials
from train.recipes.sft import PackedTrainer
from train.replay import ReplaySet, ReplaySize, replay_set


class KLReplayRecipe:
    """Cross-entropy on the dataset, KL to the base on replay rows."""

    def trainer(self, materials: Materials) -> SFTTrainer:
        settings = materials.settings
        size = ReplaySize(
            settings.replay_raw_rows,
            settings.replay_raw_tokens,
            settings.replay_chat_rows,
            settings.replay_chat_tokens,
        )
        # Sampled before the LoRA goes into the model: the anchor is the base.
        replay = replay_set(materials.model, materials.tokenizer, materials.base_weights_id, size, materials.replay_dir)
        return KLReplayTrainer(materials, replay)


class KLReplayTrainer(PackedTrainer):
    """Adds replay rows to each step, every row as often as any other."""

    def __init__(self, materials: Materials, replay: ReplaySet) -> None:
        settings = materials.settings
        self._replay = replay
        self._raw = _endless(replay.raw, settings.seed)
        self._chat = _endless(replay.chat, settings.seed)
        super().__init__(materials)

    def replay_rows(self) -> Sequence[Row]:
        raw = [next(self._raw) for _ in range(self._settings.raw_rows_per_step)]
        return [*raw, *(next(self._chat) for _ in range(self._settings.chat_rows_per_step))]

    def divergence(self, row: Row, logits: torch.Tensor) -> torch.Tensor:
        assert row.replay is not None
        return divergence(logits, self._replay.top_ids[row.replay], self._replay.top_logprobs[row.replay])


def divergence(logits: torch.Tensor, top_ids: torch.Tensor, top_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(base || model) in nats, summed over positions.

    `logits` float32 [positions, vocabulary]; `top_ids` and `top_logprobs` [positions, k]: the base's k most likely
    tokens. All other tokens count as one, so the result is a lower bound of the full divergence.
    """
    model = logits.log_softmax(-1).gather(-1, top_ids)
    smallest = torch.finfo(torch.float32).eps
    rest = (1 - top_logprobs.exp().sum(-1)).clamp_min(smallest)
    model_rest = (1 - model.exp().sum(-1)).clamp_min(smallest)
    return (top_logprobs.exp() * (top_logprobs - model)).sum() + (rest * (rest.log() - model_rest.log())).sum()


def _endless(rows: Sequence[Row], seed: int) -> Iterator[Row]:
    order = random.Random(seed)
    while True:
        yield from order.sample(rows, len(rows))
