"""A loss that cannot be trained on, tensors on different devices, values that cannot be logged: one message each."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from equipoise import StepError
from tests.support.trainer_runs import Small, loader, refuses, trainer, with_step

# Losses

LOSSES: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "a vector": (lambda m, batch: m.layer(batch[0]), ["must be a scalar", "shape [2, 1]", ".mean()"]),
    "detached": (lambda m, batch: m.loss(batch).detach(), ["no graph", "detached", "torch.no_grad()"]),
    "a number": (lambda m, batch: m.loss(batch).item(), ["must return a tensor", "not float"]),
    "a list": (lambda m, batch: [m.loss(batch)], ["must return a tensor", "the key 'loss'", "not list"]),
    "no loss": (lambda m, batch: {"los": m.loss(batch)}, ["without 'loss'", "['los']", "None to skip"]),
    "loss a number": (lambda m, batch: {"loss": 0.5}, ["as a tensor", "0.5 of type float"]),
    "loss detached": (lambda m, batch: {"loss": m.loss(batch).detach()}, ["no graph"]),
}
WITH_OPTIONS = [("a vector", {"accumulate_grad_batches": 2}), ("no loss", {"precision": "16-mixed"})]


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in LOSSES), *WITH_OPTIONS])
def test_a_loss_that_cannot_be_trained_on(name: str, options: dict[str, Any]) -> None:
    step, parts = LOSSES[name]
    module = with_step(step)
    before = module.layer.weight.detach().clone()
    refuses(lambda: trainer(**options).fit(module, loader()), *parts, error=StepError)
    assert torch.equal(module.layer.weight, before)


def test_a_loss_of_frozen_parameters() -> None:
    module = Small().requires_grad_(False)
    refuses(lambda: trainer().fit(module, loader()), "Are all parameters frozen?", error=StepError)


@pytest.mark.parametrize(
    ("weight", "shown"),
    [("all", "'all'"), (-1, "-1"), (True, "True"), (float("nan"), "nan"), (torch.ones(2), "a tensor of shape [2]")],
    ids=str,
)
def test_a_loss_weight_that_is_no_number_from_0(weight: Any, shown: str) -> None:
    module = with_step(lambda m, batch: {"loss": m.loss(batch), "loss_weight": weight})
    run = trainer(accumulate_grad_batches=2)
    refuses(lambda: run.fit(module, loader()), "'loss_weight'", "a number from 0", f"not {shown}", error=StepError)


@pytest.mark.parametrize("size", [-1, 2.5, "two"])
def test_a_batch_size_that_is_no_number_of_samples(size: Any) -> None:
    module = Small()
    module.batch_size = lambda batch: size
    run, words = trainer(accumulate_grad_batches=2), ("`batch_size(batch)`", "number of samples", f"not {size!r}")
    refuses(lambda: run.fit(module, loader()), *words, error=StepError)


MANUAL: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "backward of a number": (lambda m, batch: m.manual_backward(0.3), ["`manual_backward`", "0.3 of type float"]),
    "backward of a vector": (lambda m, batch: m.manual_backward(m.layer(batch[0])), ["scalar", "[2, 1]"]),
    "backward without graph": (lambda m, batch: m.manual_backward(m.loss(batch).detach()), ["no graph"]),
    "a number returned": (lambda m, batch: 0.5, ["returns a tensor, a dictionary or nothing", "not float"]),
}


@pytest.mark.parametrize("name", MANUAL)
def test_losses_of_manual_optimisation(name: str) -> None:
    step, parts = MANUAL[name]
    module = with_step(step)
    module.automatic_optimization = False
    refuses(lambda: trainer().fit(module, loader()), *parts, error=StepError)


def test_a_closure_that_is_not_called_is_an_error() -> None:
    module = type("Module", (Small,), {"optimizer_step": lambda self, *args: None})()
    with pytest.raises(MisconfigurationException, match=r"`optimizer_step` did not run its closure.*optimizer_closure"):
        trainer().fit(module, loader())


# Devices that differ: the meta device stands for any other


class OnMeta(Small):
    """Computes with a tensor on another device; its batch is a list and the same features on the CPU."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("parameter", "buffer"):  # a parameter there keeps a module with a buffer where it is
            self.other = nn.Linear(2, 1, device="meta")
        if kind == "parameter":
            self.unused = nn.Sequential(*(nn.PReLU(device="meta") for _ in range(4)))
            self.most = nn.Sequential(*(nn.PReLU() for _ in range(3)))
        if kind == "buffer":
            self.register_buffer("scale", torch.ones(1, device="meta"))

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        features = batch[0]
        return {"inputs": [features.to("meta") if self.kind == "batch" else features], "mask": features}

    def loss(self, batch: Any) -> Tensor:
        (features,), here = batch["inputs"], self.layer(batch["mask"])
        there = {
            "batch": lambda: self.layer(features),
            "parameter": lambda: self.other(features),
            "buffer": lambda: self.scale,
            "constant": lambda: torch.ones(2, 1, device="meta"),
        }[self.kind]
        return (here + there()).mean()


@pytest.mark.parametrize(
    ("kind", "entry", "parts"),
    [
        ("batch", "fit", ["batch['inputs'][0] is on meta", "the rest is on cpu", "`self.device`"]),
        ("batch", "test", ["batch['inputs'][0] is on meta", "the rest is on cpu", "`self.device`"]),
        ("parameter", "fit", ["parameter 'other.weight' is on meta", "; and 1 more, while the rest is on cpu"]),
        ("buffer", "fit", ["buffer 'scale' is on meta", "the rest is on cpu", "`register_buffer`"]),
        ("constant", "fit", ["all parameters and buffers are on cpu", "OnMeta makes", "on `self.device`", "meta"]),
    ],
)
def test_tensors_on_different_devices_are_named(kind: str, entry: str, parts: list[str]) -> None:
    with pytest.raises(StepError, match="different devices") as caught:
        getattr(trainer(), entry)(OnMeta(kind), loader())
    message = str(caught.value)
    assert not [part for part in parts if part not in message], message
    assert isinstance(caught.value.__cause__, RuntimeError)


# What is logged


@pytest.mark.parametrize("value", ["0.5", np.ones(1)], ids=repr)
def test_a_logged_value_is_a_number(value: Any) -> None:
    module = with_step(lambda m, batch: m.log("value", value))
    refuses(
        lambda: trainer().fit(module, loader()), "self.log('value'", "a number", type(value).__name__, error=ValueError
    )


def test_a_logged_tensor_has_one_element() -> None:
    module = with_step(lambda m, batch: m.log("value", torch.ones(1000, 20)))
    with pytest.raises(ValueError, match=r"\(1000, 20\).*must have a single element.*mean") as caught:
        trainer().fit(module, loader())
    assert len(str(caught.value)) < 200  # it does not show the values
