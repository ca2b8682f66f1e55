"""`self.log` in all its forms: levels, destinations, reductions, weights, values of every kind."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import data
from ..harness import Case, columns, parity
from ..modules import Classifier

Log = Callable[[Any, Tensor, int], Any]


def logging_module(
    train: Log | None = None, val: Log | None = None, hyperparameters: bool = False
) -> Callable[[], Any]:
    """A module that logs nothing but what the functions log; each gets the module, the loss and the batch index."""

    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            if train is not None:
                train(self, loss, batch_idx)
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if val is not None:
                val(self, self.loss(batch), batch_idx)

    return Logs


def both(log: Log) -> Callable[[], Any]:
    return logging_module(log, log)


def changed_afterwards(module: Any, loss: Tensor, index: int) -> None:
    value = torch.tensor(float(index))
    module.log("value", value, on_step=True, on_epoch=True)
    value.add_(100.0)


def kinds(module: Any, loss: Tensor, index: int) -> None:
    module.log("float", 0.1 * index, on_step=True, on_epoch=True)
    module.log("int", 3 + index, on_step=True, on_epoch=True)
    module.log("bool", index % 2 == 0, on_epoch=True)
    module.log("double", loss.double(), on_step=True, on_epoch=True)
    module.log("half", loss.to(torch.bfloat16), on_step=True, on_epoch=True)
    module.log("long", torch.tensor(index), on_step=True, on_epoch=True)
    module.log("one_element", loss.reshape(1, 1), on_step=True, on_epoch=True)


def reductions(module: Any, loss: Tensor, index: int) -> None:
    for name in ("mean", "sum", "min", "max"):
        module.log(name, loss, on_step=True, on_epoch=True, reduce_fx=name)
        module.log(f"torch_{name}", loss + index, on_epoch=True, reduce_fx=getattr(torch, name))
    module.log("int_sum", index, on_step=False, on_epoch=True, reduce_fx="sum")


def extremes(module: Any, loss: Tensor, index: int) -> None:
    value = (float("nan"), float("inf"), -float("inf"))[index % 3]
    for name in ("mean", "sum", "min", "max"):
        module.log(name, value, on_step=True, on_epoch=True, reduce_fx=name)


def destinations(module: Any, loss: Tensor, index: int) -> None:
    module.log("everywhere", loss, prog_bar=True, logger=True, on_step=True, on_epoch=True)
    module.log("bar_only", loss, prog_bar=True, logger=False, on_step=True, on_epoch=True)
    module.log("nowhere", loss, prog_bar=False, logger=False, on_step=True, on_epoch=True)
    module.log("bar_epoch", loss, prog_bar=True, on_step=False, on_epoch=True)
    module.log("with/slash", loss, prog_bar=True, on_step=True, on_epoch=True)


def dictionaries(module: Any, loss: Tensor, index: int) -> None:
    module.log_dict({"a": loss, "b": index, "c": 0.5}, prog_bar=True)
    module.log_dict({"x/a": loss, "x/b": loss * 2}, on_step=True, on_epoch=True, reduce_fx="max")


def sometimes(module: Any, loss: Tensor, index: int) -> None:
    if index % 2 == 1:
        module.log("odd", loss, on_step=True, on_epoch=True)
    if index == 0 and module.current_epoch == 1:
        module.log("new_in_second_epoch", loss, on_step=True, on_epoch=True)


def weights(module: Any, loss: Tensor, index: int) -> None:
    module.log("inferred", loss, on_step=False, on_epoch=True)
    module.log("given", loss, on_step=False, on_epoch=True, batch_size=10 * index + 1)
    module.log("given_sum", loss, on_step=False, on_epoch=True, batch_size=index + 1, reduce_fx="sum")


def axes(module: Any, loss: Tensor, index: int) -> None:
    module.log("loss", loss)
    module.log("step", float(10 * module.trainer.global_step))


def twice_equal(module: Any, loss: Tensor, index: int) -> None:
    module.log("value", loss, on_epoch=True)
    module.log("value", loss * 2, on_epoch=True)


def with_graph(module: Any, loss: Tensor, index: int) -> None:
    module.log("with_graph", loss, enable_graph=True)
    module.log("rank_zero", loss, rank_zero_only=True)
    module.log("synchronised", loss, sync_dist=True, on_epoch=True)


def simple(module: Any, loss: Tensor, index: int) -> None:
    module.log("loss", loss)
    module.log("mean_loss", loss, on_step=True, on_epoch=True)


CASES = [
    Case(
        name="step-and-epoch",
        module=both(lambda m, loss, i: m.log("loss", loss, on_step=True, on_epoch=True)),
        proves=lambda r: {"loss_step", "loss_epoch"} <= columns(r),
    ),
    Case(name="destinations", module=both(destinations), proves=lambda r: "bar_only_step" not in columns(r)),
    Case(name="reductions", module=logging_module(reductions)),
    Case(name="not-finite", module=both(extremes)),
    Case(name="kinds-of-values", module=both(kinds)),
    Case(name="changed-in-place-afterwards", module=both(changed_afterwards)),
    Case(name="unequal-batches", module=both(weights), data=data.odd),
    Case(name="log-dict", module=both(dictionaries)),
    Case(name="not-in-every-step", module=both(sometimes)),
    Case(name="own-step-axis", module=logging_module(axes), proves=lambda r: "step" in columns(r)),
    Case(name="logged-twice", module=logging_module(twice_equal)),
    Case(name="two-validation-loaders", module=logging_module(simple, simple), data=data.several_val),
    *(
        Case(
            name=f"every-{every}-steps-accumulating-{accumulate}",
            module=both(simple),
            options={"log_every_n_steps": every, "accumulate_grad_batches": accumulate},
        )
        for every, accumulate in ((2, 1), (4, 1), (50, 1), (0, 1), (2, 2), (1, 3))
    ),
]

test_parity = parity(CASES)
