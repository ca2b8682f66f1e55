"""Manual optimisation: the user's own backward, steps, closures, toggling and schedulers."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from ..harness import Case, parity
from ..modules import Classifier


class Manual(Classifier):
    """One optimiser by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class ByClosure(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        self.log("closure_loss", optimizer.step(closure=closure))


class Accumulates(Manual):
    """Steps every second batch, clips first."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2 == 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class Unwrapped(Manual):
    """Steps the optimiser itself, past Lightning's wrapper: such steps are not counted. Returns a dictionary."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers(use_pl_optimizer=False)
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss, "index": batch_idx}


class Scheduled(Manual):
    """Steps a scheduler in every batch and another in every epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.lr_schedulers()[0].step()
        return loss

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers()[1].step(self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), 0.1)
        plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=1e6, threshold_mode="abs")
        return [optimizer], [StepLR(optimizer, 2, 0.9), plateau]


class Pair(Manual):
    """Two optimisers over two parts of the network, in turn, as adversarial training does."""

    def configure_optimizers(self) -> Any:
        return [SGD(self.net[0].parameters(), 0.1), Adam(self.net[-1].parameters(), 0.01)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log(f"loss_{index}", loss)


class Toggled(Pair):
    """Freezes what the other optimiser trains, by `toggle_optimizer`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            frozen = sum(not p.requires_grad for p in self.parameters())
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log(f"frozen_{index}", float(frozen))


class OwnHooks(Manual):
    """Overrides the hooks around the backward and the step."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("loss_before_backward", loss.detach())

    def on_after_backward(self) -> None:
        self.net[0].weight.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


CASES = [
    Case(name="closure", module=ByClosure),
    Case(name="accumulates-and-clips", module=Accumulates, proves=lambda r: r["counters"]["global_step"] == 6),
    Case(
        name="unwrapped-returns-dictionary",
        module=Unwrapped,
        proves=lambda r: r["counters"]["global_step"] == 0,
    ),
    Case(name="schedulers-by-hand", module=Scheduled),
    Case(name="two-toggled", module=Toggled, proves=lambda r: r["metrics"]["callback_metrics"]["frozen_0"] == 2),
    Case(name="hooks", module=OwnHooks),
    Case(name="max-steps", module=Pair, options={"max_epochs": -1, "max_steps": 10}),
]

test_parity = parity(CASES)
