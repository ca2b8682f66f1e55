"""Every form that `configure_optimizers` may return, and optimisers of every kind."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

from .harness import Case, Record, parity
from .modules import Classifier, with_optimizers


def sgd(module: Any) -> SGD:
    return SGD(module.parameters(), 0.1, momentum=0.9)


def two_lists(module: Any) -> Any:
    optimizer = sgd(module)
    return [optimizer], [StepLR(optimizer, 1, 0.5)]


def two_lists_of_dictionaries(module: Any) -> Any:
    optimizer = sgd(module)
    return [optimizer], [
        {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"},
        {"scheduler": ExponentialLR(optimizer, 0.9)},
    ]


def list_and_single_scheduler(module: Any) -> Any:
    optimizer = sgd(module)
    return [optimizer], StepLR(optimizer, 1, 0.5)


def dictionary(module: Any) -> Any:
    return {"optimizer": sgd(module)}


def dictionary_with_scheduler(module: Any) -> Any:
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, 0.5)}


def dictionary_of_dictionaries(module: Any) -> Any:
    optimizer = sgd(module)
    config = {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step", "frequency": 2, "name": "by two"}
    return {"optimizer": optimizer, "lr_scheduler": config}


def dictionary_with_monitor(module: Any) -> Any:
    optimizer = sgd(module)
    return {
        "optimizer": optimizer,
        "lr_scheduler": ReduceLROnPlateau(optimizer, patience=0, threshold=9),
        "monitor": "val_loss",
    }


def tuple_of_one_dictionary(module: Any) -> Any:
    return (dictionary_of_dictionaries(module),)


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
    Case(name="list-of-one", module=with_optimizers(lambda m: [sgd(m)])),
    Case(name="tuple-of-one", module=with_optimizers(lambda m: (sgd(m),))),
    Case(name="two-lists", module=with_optimizers(two_lists), proves=lambda r: learning_rates(r) == [0.025]),
    Case(name="two-lists-of-dictionaries", module=with_optimizers(two_lists_of_dictionaries)),
    Case(name="list-and-single-scheduler", module=with_optimizers(list_and_single_scheduler)),
    Case(name="dictionary", module=with_optimizers(dictionary)),
    Case(name="dictionary-with-scheduler", module=with_optimizers(dictionary_with_scheduler)),
    Case(name="dictionary-of-dictionaries", module=with_optimizers(dictionary_of_dictionaries)),
    Case(
        name="dictionary-with-monitor",
        module=with_optimizers(dictionary_with_monitor),
        proves=lambda r: learning_rates(r)[0] < 0.1,
    ),
    Case(name="tuple-of-one-dictionary", module=with_optimizers(tuple_of_one_dictionary)),
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
