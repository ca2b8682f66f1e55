"""The first promise, as a harness: however a batch is split, a run equals that of one device on the whole batch.

A `Run` holds what is compared: the gradients before each step, the weights after the last one, and the logged values.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from equipoise import Strategy, Trainer
from tests.support.batches import SIZES, Batches
from tests.support.equality import assert_equal
from tests.support.quiet import QUIET

__all__ = ["OPTIONS", "Gradients", "Run", "assert_same_run", "on_one_device", "train"]

# Options of a trainer that change a step.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated and clipped by value": {
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
}


class Gradients(L.Callback):
    """Keeps all gradients before every step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor | None]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        named = module.named_parameters()
        self.seen.append({name: None if p.grad is None else p.grad.clone() for name, p in named})


class Run(NamedTuple):
    """A finished fit.

    Attributes:
        module: The trained module.
        gradients: The gradients by name before each step.
        trainer: The trainer.
    """

    module: Any
    gradients: list[dict[str, Tensor | None]]
    trainer: Trainer


def train(
    make: Callable[[], L.LightningModule],
    strategy: Strategy | str = "single_device",
    devices: int | Sequence[str] = 1,
    sizes: Sequence[int] = SIZES,
    *,
    seed: int = 0,
    val: list[int] | None = None,
    callbacks: list[L.Callback] | None = None,
    ckpt_path: Any = None,
    reads_gradients: bool = True,
    **options: Any,
) -> Run:
    """Train a module from one seed in float64 for two epochs, and keep what a comparison needs.

    Args:
        make: Makes the module; its weights are made in float64.
        strategy: The strategy. Default: one device.
        devices: The devices, or the number of CPU devices. Default: 1.
        sizes: Sizes of the training batches. Default: those of `tests.support.batches`.
        seed: Seed of the batches. Default: 0.
        val: Sizes of the validation batches. Default: no validation.
        callbacks: Further callbacks. Default: none.
        ckpt_path: A checkpoint to go on from. Default: none.
        reads_gradients: Whether gradients are kept, which no callback can read in other processes. Default: True.
        options: Further arguments of the trainer, such as another precision.
    """
    torch.manual_seed(7)
    module, gradients = make(), Gradients()
    trainer = Trainer(
        strategy=strategy,
        devices=["cpu"] * devices if isinstance(devices, int) else list(devices),
        callbacks=[*([gradients] if reads_gradients else []), *(callbacks or [])],
        **{**QUIET, "max_epochs": 2, "precision": "64-true", **options},
    )
    loaders = [DataLoader(Batches(sizes, seed), batch_size=None)]
    if val is not None:
        loaders.append(DataLoader(Batches(val, seed + 1), batch_size=None))
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return Run(module, gradients.seen, trainer)


@cache
def _reference(make: Callable[[], L.LightningModule], options: tuple[tuple[str, Any], ...]) -> Run:
    return train(make, **dict(options))


def on_one_device(make: Callable[[], L.LightningModule], **options: Any) -> Run:
    """Return the run on one device, which is made once for each module and its hashable options."""
    return _reference(make, tuple(options.items()))


def assert_same_run(expected: Run, actual: Run, tolerance: float = 1e-12) -> None:
    """Assert that two runs have the same gradients in each step, weights and logged values."""
    (module, gradients, trainer), (other, other_gradients, other_trainer) = expected, actual
    assert_equal(gradients, other_gradients, tolerance, title="Gradients")
    assert_equal(module, other, tolerance, title="Weights")
    logged = dict(trainer.callback_metrics), dict(other_trainer.callback_metrics)
    assert_equal(*logged, tolerance, title="Logged values")
