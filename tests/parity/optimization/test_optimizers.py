"""Optimisers of every kind; `tests/trainer/optimization/configuration` has the forms of `configure_optimizers`."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import StepLR

from ..harness import Case, Record, parity
from ..modules import Classifier, with_optimizers


def parameter_groups(module: Any) -> Any:
    first, last = module.net[0], module.net[-1]
    return SGD([{"params": first.parameters(), "lr": 0.01}, {"params": last.parameters(), "weight_decay": 0.1}], 0.1)


class Twice(SGD):
    """Evaluates its closure twice and steps on the second gradient, as sharpness-aware methods do."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=0.05)
        return super().step(closure)


class Forgetful(SGD):
    """Never calls its closure, so no gradient is ever computed."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        return None


class PlainStep(SGD):
    """Overrides `step` without taking anything from the base class."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=0.01)
        return loss


class HookedSGD(SGD):
    """Counts its `zero_grad` calls in its state, so an override of it must be called."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.param_groups[0]["cleared"] = self.param_groups[0].get("cleared", 0) + 1
        super().zero_grad(set_to_none)


def with_torch_hooks(module: Any) -> Any:
    optimizer = SGD(module.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda opt, *_: opt.param_groups[0].update(lr=opt.param_groups[0]["lr"] * 0.9))
    return optimizer


class Untrained(Classifier):
    """Runs without an optimiser."""

    def configure_optimizers(self) -> None:
        return None


class Complete(Classifier):
    """Uses the pieces that a module may read while it makes its optimiser."""

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer = SGD(self.parameters(), 0.1 / steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": StepLR(optimizer, steps // 2, 0.1), "interval": "step"},
        }


def learning_rates(record: Record) -> list[float]:
    return [group["lr"] for optimizer in record["optimizers"] for group in optimizer["param_groups"]]


CASES = [
    Case(name="none", module=Untrained, proves=lambda r: r["optimizers"] == [{}]),
    Case(name="estimated-stepping-batches", module=Complete, proves=lambda r: learning_rates(r)[0] < 0.002),
    Case(name="parameter-groups", module=with_optimizers(parameter_groups)),
    Case(name="lbfgs", module=with_optimizers(lambda m: LBFGS(m.parameters(), 0.1, max_iter=3))),
    Case(name="closure-twice", module=with_optimizers(lambda m: Twice(m.parameters(), 0.1))),
    Case(name="own-step", module=with_optimizers(lambda m: PlainStep(m.parameters(), 0.1))),
    Case(
        name="own-zero-grad",
        module=with_optimizers(lambda m: HookedSGD(m.parameters(), 0.1)),
        proves=lambda r: r["optimizers"][0]["param_groups"][0]["cleared"] > 0,
    ),
    Case(name="torch-step-hook", module=with_optimizers(with_torch_hooks)),
    Case(
        name="closure-never-called",
        module=with_optimizers(lambda m: Forgetful(m.parameters(), 0.1)),
        raises=MisconfigurationException,
    ),
]

test_parity = parity(CASES)
