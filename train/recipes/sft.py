"""Plain supervised fine-tuning: TRL's trainer and a PEFT LoRA, cross-entropy on completions.

At a high learning rate it learns quickly and forgets as quickly; `sft_kl` adds what holds it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from peft.helpers import disable_input_dtype_casting
from torch.nn import functional
from trl import SFTConfig, SFTTrainer

from train.decoder import Decoder
from train.packing import Row, pack_rows
from train.recipes.base import Materials
from train.settings import first_trained_layer

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class PlainRecipe:
    """Cross-entropy alone."""

    def trainer(self, materials: Materials) -> SFTTrainer:
        return PackedTrainer(materials)


class PackedTrainer(SFTTrainer):  # type: ignore[misc]
    """TRL's trainer with the forward pass over packs (`train.packing`): the dataset it iterates holds row numbers."""

    def __init__(self, materials: Materials) -> None:
        settings = materials.settings
        layers = int(materials.model.config.num_hidden_layers)
        first_layer = first_trained_layer(settings, layers)
        self._rows = tuple(materials.rows)
        self._seen = [0] * len(self._rows)
        self._settings = settings
        self._decoder = Decoder(materials.model, first_layer)
        super().__init__(
            model=materials.model,
            args=_arguments(materials, -(-len(self._rows) // settings.batch_rows)),
            data_collator=lambda examples: {"row": torch.tensor([example["row"] for example in examples])},
            train_dataset=Dataset.from_dict({"row": list(range(len(self._rows)))}),
            processing_class=materials.tokenizer,
            peft_config=LoraConfig(
                r=settings.rank,
                lora_alpha=settings.alpha,
                lora_dropout=0.0,
                target_modules=PROJECTIONS,
                layers_to_transform=list(range(first_layer, layers)),
                layers_pattern="layers",
                task_type="CAUSAL_LM",
            ),
            callbacks=list(materials.callbacks),
        )

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        """The loss of one step; `inputs["row"]` holds the numbers of its rows."""
        rows = [self._next_variant(number) for number in inputs["row"].tolist()]
        extra = self.replay_rows()
        tokens = sum(row.targets for row in rows)
        replayed = sum(row.targets for row in extra)
        loss = torch.zeros(())
        divergence = torch.zeros(())
        for pack in pack_rows([*rows, *extra], self._settings.max_pack_tokens):
            places = [pack.target_positions(index) for index in range(len(pack.rows))]
            # The trainer's own autocast wraps `model.forward`, which is not called here. Autocast takes products in
            # bf16; PEFT's own cast to fp32 before them would only copy.
            with torch.autocast("cpu", torch.bfloat16), disable_input_dtype_casting(self.model):
                states = self._decoder.hidden(pack)
                logits = torch.split(self._decoder.logits(states[torch.cat(places)]), [len(place) for place in places])
            for row, scores in zip(pack.rows, logits, strict=True):
                if row.replay is None:
                    loss = loss + _cross_entropy(row, scores) / tokens
                else:
                    divergence = divergence + self.divergence(row, scores) / replayed
        if extra:
            self._metrics["train"]["kl"].append(divergence.item())
        return loss + self._settings.kl_weight * divergence

    def _next_variant(self, number: int) -> Row:
        variants = self._rows[number]
        self._seen[number] += 1
        return variants[(self._seen[number] - 1) % len(variants)]

    def replay_rows(self) -> Sequence[Row]:
        """Rows added to the next step whose targets are the base's distributions."""
        return ()

    def divergence(self, row: Row, logits: torch.Tensor) -> torch.Tensor:
        """Summed divergence from the base over a replay row; `logits` float32 [targets, vocabulary]."""
        raise NotImplementedError(f"{type(self).__name__} has no replay rows")


def _cross_entropy(row: Row, logits: torch.Tensor) -> torch.Tensor:
    targets = torch.from_numpy(row.token_ids[row.first_target_position + 1 :])
    return functional.cross_entropy(logits, targets, reduction="sum")


def _arguments(materials: Materials, steps_per_epoch: int) -> SFTConfig:
    settings = materials.settings
    return SFTConfig(
        output_dir=str(materials.work_dir),
        per_device_train_batch_size=settings.batch_rows,
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=round(settings.warmup_share * settings.epochs * steps_per_epoch),
        weight_decay=0.0,
        max_grad_norm=settings.max_gradient_norm,
        seed=settings.seed,
        bf16=True,
        use_cpu=True,
        activation_checkpointing=False,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        completion_only_loss=False,
        save_strategy="no",
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to="none",
    )
