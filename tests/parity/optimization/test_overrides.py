"""Overrides of a module in the optimisation step, alone and together."""

from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from ..harness import Case, parity
from ..modules import Classifier


class StepsItself(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)


class WarmsUp(Classifier):
    """Steps first, then raises the rate: Lightning's documented warm-up."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 8) * 0.1


class StepsEverySecondBatch(Classifier):
    """Steps with the closure on every second batch and only computes gradients on the others."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if batch_idx % 2 == 1:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class OwnBackward(Classifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (3 * loss).backward(*args, **kwargs)


class OwnZeroGrad(Classifier):
    """Zeroes in place, so the gradients stay the same tensors."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class ClipsMore(Classifier):
    """Clips more tightly in every epoch, through `clip_gradients`; refused where the trainer was given a value too."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, 0.1 / (1 + self.current_epoch), "norm")


class ClipsFirstLayer(Classifier):
    """Uses the trainer's value, for a part of the parameters."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        assert gradient_clip_algorithm == "norm"
        torch.nn.utils.clip_grad_norm_(self.net[0].parameters(), gradient_clip_val)


class ZeroGradHook(Classifier):
    """Reads gradients before they are cleared."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        gradient = self.net[0].weight.grad
        self.seen = [*getattr(self, "seen", []), None if gradient is None else gradient.norm().item()]


class BackwardHooks(Classifier):
    """Adds noise-free changes to gradients right after the backward, and counts the losses it saw."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.losses = [*getattr(self, "losses", []), loss.item()]

    def on_after_backward(self) -> None:
        self.net[0].weight.grad.mul_(2)


class StepHook(Classifier):
    """Normalises gradients before the step, after which they are clipped."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm() + 1e-8)


class Everything(WarmsUp, OwnBackward, OwnZeroGrad, ClipsFirstLayer, BackwardHooks, StepHook, ZeroGradHook):
    """All of them at once."""


class SkipsSome(Classifier):
    """Returns nothing for every third batch: no backward, but the optimiser's turn comes all the same."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class ReturnsDictionary(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "size": len(batch[0]), "logits": self(batch[0]), "text": "kept"}


class EndsEpochEarly(Classifier):
    """Leaves every epoch at its fourth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


def seen(name: str) -> Any:
    return lambda trainer: getattr(trainer.lightning_module, name)


CLIPPED = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"}

CASES = [
    Case(name="optimizer-step-own", module=StepsItself, options={"accumulate_grad_batches": 2}),
    Case(
        name="optimizer-step-every-second-batch",
        module=StepsEverySecondBatch,
        proves=lambda r: r["counters"]["global_step"] == 12,
    ),
    Case(name="clipping-own", module=ClipsMore),
    Case(name="clipping-given-twice", module=ClipsMore, options=CLIPPED, raises=MisconfigurationException),
    Case(
        name="everything-overridden-accumulated",
        module=Everything,
        observe=seen("seen"),
        options={**CLIPPED, "accumulate_grad_batches": 2},
    ),
    Case(name="training-step-returns-none", module=SkipsSome, observe=lambda trainer: trainer.global_step),
    Case(name="training-step-returns-dictionary", module=ReturnsDictionary),
    Case(
        name="epoch-ended-by-minus-one-in-a-window",
        module=EndsEpochEarly,
        options={"max_epochs": 3, "accumulate_grad_batches": 2},
    ),
]

test_parity = parity(CASES)
