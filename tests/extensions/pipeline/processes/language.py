"""A module that predicts tokens, and samples of it to be dealt among replicas."""

from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import Dataset

from tests.support.batches import Batches
from tests.support.pipelines import Tokens

__all__ = ["STEP", "Counted", "Unfreezes", "samples"]

STEP = 12  # samples of a step, on all replicas together


class Counted(Tokens):
    """Logs means over tokens, which do not depend on the division into batches."""

    def mean(self, batch: Any, name: str) -> dict[str, Any]:
        logits = self.net(batch["tokens"], batch["mask"])["logits"]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten(), reduction="none")
        weight = batch["mask"].sum()
        loss = (losses * batch["mask"].flatten()).sum() / weight
        self.log(name, loss, on_epoch=True, on_step=False, batch_size=int(weight))
        return {"loss": loss, "loss_weight": weight}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.mean(batch, "loss")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean(batch, "val")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda parameter: parameter.requires_grad, self.parameters()), lr=0.02)


class Unfreezes(BaseFinetuning):
    """Trains the last block at first, then all: parameters are added to the optimiser."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.embedding, *pl_module.net.blocks[:3]])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(list(pl_module.net.blocks[:3]), optimizer, lr=0.01)


def samples(count: int) -> Dataset[Any]:
    """Samples of `tests.support.batches`."""
    (batch,) = Batches([count])
    return [{name: batch[name][index] for name in ("tokens", "mask")} for index in range(count)]  # type: ignore[return-value]
