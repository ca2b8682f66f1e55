"""Fits on a simulated device whose steps are eager or captured, and their comparison to the bit."""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import lightning as L
import numpy
import torch
from torch import Tensor

from tests.simulated.devices.graphs import num_graphs
from tests.simulated.devices.installation import extension
from tests.support.pipelines import quiet
from tests.support.step_networks import SIZES, batches

__all__ = [
    "DEVICE",
    "STAYS_EAGER",
    "Graphs",
    "Result",
    "assert_same",
    "fit",
]

STAYS_EAGER = "Captured steps: the training step stays eager, because"
DEVICE = torch.device("cuda", 0)


class Watch(L.Callback):
    """Notes outputs, logged values and gradients of all steps. It keeps the tensors themselves."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.gradients: list[list[Tensor | None]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        values = {name: value for name, value in trainer.callback_metrics.items() if "epoch" not in name}
        self.seen.append((dict(outputs), values))
        gradients = [parameter.grad for parameter in module.parameters()]
        self.gradients.append([None if gradient is None else gradient.clone() for gradient in gradients])


class Graphs(L.Callback):
    """Notes how many graphs there are after each step, more than before the training."""

    def __init__(self) -> None:
        self.before = 0
        self.more: list[int] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.before = num_graphs()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.more.append(num_graphs() - self.before)


class Result(NamedTuple):
    """Result of a fit.

    Attributes:
        module: The module.
        state: All that is compared.
        replays: Number of replays.
    """

    module: Any
    state: dict[str, Any]
    replays: int


def fit(make: Callable[[], L.LightningModule], sizes: Sequence[int] = SIZES, **options: Any) -> Result:
    """Train for two epochs. Callables among the options make a value for this fit alone."""
    watch = Watch()
    chosen = {name: value() if callable(value) else value for name, value in options.items()}
    chosen["callbacks"] = [watch, *chosen.pop("callbacks", [])]
    of_fit = {name: chosen.pop(name) for name in ("ckpt_path", "val_dataloaders") if name in chosen}
    trainer = quiet(
        **{"accelerator": "cuda", "devices": [DEVICE], "strategy": "single_device", "max_epochs": 2, **chosen}
    )
    module = make()
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(11)
    extension().take_launches()
    extension().record_launches(True)
    try:
        trainer.fit(module, batches(sizes, _dtype(chosen)), **of_fit)
    finally:
        extension().record_launches(False)
    replays = [name for _, name in extension().take_launches()].count("CUDAGraph.replay")
    state = {
        "module": module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "metrics": dict(trainer.callback_metrics),
        "steps": watch.seen,
        "gradients": watch.gradients,
        "generators": [torch.get_rng_state(), torch.cuda.get_rng_state(DEVICE), random.getstate()],
    }
    return Result(module, state, replays)


def _dtype(options: dict[str, Any]) -> torch.dtype:
    return torch.float64 if options.get("precision", "64-true") == "64-true" else torch.float32


def assert_same(captured: Result, eager: Result) -> None:
    """Compare two fits to the bit."""
    torch.testing.assert_close(captured.state, eager.state, rtol=0, atol=0, equal_nan=True)
