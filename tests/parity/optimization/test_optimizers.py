"""Optimisers of every kind; `tests/trainer/optimization/configuration` has the forms of `configure_optimizers`."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import StepLR

from ..harness import Case, Record, parity
from ..modules import Classifier, with_optimizers


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


class HookedSGD(SGD):
    """Counts its `zero_grad` calls in its state, so an override of it must be called."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.param_groups[0]["cleared"] = self.param_groups[0].get("cleared", 0) + 1
        super().zero_grad(set_to_none)


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
    Case(name="estimated-stepping-batches", module=Complete, proves=lambda r: learning_rates(r)[0] < 0.002),
    Case(name="lbfgs", module=with_optimizers(lambda m: LBFGS(m.parameters(), 0.1, max_iter=3))),
    Case(name="closure-twice", module=with_optimizers(lambda m: Twice(m.parameters(), 0.1))),
    Case(
        name="own-zero-grad",
        module=with_optimizers(lambda m: HookedSGD(m.parameters(), 0.1)),
        proves=lambda r: r["optimizers"][0]["param_groups"][0]["cleared"] > 0,
    ),
    Case(
        name="closure-never-called",
        module=with_optimizers(lambda m: Forgetful(m.parameters(), 0.1)),
        raises=MisconfigurationException,
    ),
]

test_parity = parity(CASES)
