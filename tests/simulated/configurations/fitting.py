"""A fit of a configuration, on simulated devices or on the CPU, and the comparison of two such fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import Strategy
from tests.simulated.devices.selection import on_the_host
from tests.support.batches import CLASSES, FEATURES, SIZES, TOKENS, Batches
from tests.support.equality import assert_equal
from tests.support.networks.transparency import Base, Convolution, Frozen, Manual, Masked, Recurrent, Tied
from tests.support.pipelines import quiet

__all__ = [
    "Configuration",
    "Deep",
    "LoggedConvolution",
    "LoggedFrozen",
    "LoggedManual",
    "LoggedMasked",
    "LoggedRecurrent",
    "LoggedTied",
    "Logging",
    "Plain",
    "Result",
    "assert_same_result",
    "fit_on_devices",
    "fit_on_the_host",
]

WIDTH = 7
SEED = 11


# Modules


class Logging(Base):
    """Logs the loss of each step and its mean, and a number that no device has computed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if output is not None:
            loss = output["loss"] if isinstance(output, dict) else output
            self.log("loss", loss.detach(), on_step=True, on_epoch=True, batch_size=len(batch["label"]))
        self.log("number", float(batch_idx), on_epoch=True, batch_size=len(batch["label"]))
        return output


class Deep(Logging):
    """As many layers as a pipeline with several stages on each device needs."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(TOKENS * FEATURES, WIDTH)]
        for _ in range(4):
            layers += [nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
        self.net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    def forward(self, features: Tensor) -> Any:
        return self.net(features)


class Plain(Deep):
    """The same with SGD: Adam would make differences of rounding as large as a gradient."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class LoggedRecurrent(Logging, Recurrent):
    """An LSTM."""


class LoggedConvolution(Logging, Convolution):
    """Convolutions and group norms."""


class LoggedMasked(Logging, Masked):
    """A loss whose weight is a tensor on the device."""


class LoggedTied(Logging, Tied):
    """An embedding that is the weight of the output as well."""


class LoggedFrozen(Logging, Frozen):
    """A frozen layer, an unused one, and one that only some batches use."""


class LoggedManual(Logging, Manual):
    """Two optimisers, stepped by hand."""


# Fits


@dataclass(frozen=True)
class Configuration:
    """A fit that can be done on any devices.

    Args:
        name: Its name in the list of tests.
        strategy: Makes the strategy.
        devices: The simulated devices.
        make: Makes the module.
        options: Further arguments of the Trainer.
        sizes: Numbers of samples in the batches of an epoch.
        tolerance: Largest difference, relative to the size of a tensor.
    """

    name: str
    strategy: Callable[[], Strategy | str]
    devices: Sequence[str] = ("cuda:0", "cuda:1")
    make: Callable[[], L.LightningModule] = Deep
    options: dict[str, Any] = field(default_factory=dict)
    sizes: Sequence[int] = tuple(SIZES)
    tolerance: float = 1e-12


@dataclass
class Result:
    """Result of a fit, on the CPU.

    Attributes:
        state: The state of the module by name.
        optimizer_states: The states of all optimisers by name.
        logged: The values that callbacks see after each batch and each epoch.
    """

    state: dict[str, Tensor]
    optimizer_states: dict[str, Tensor]
    logged: list[dict[str, float]]


class Values(L.Callback):
    """Keeps what callbacks see after each batch and each epoch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._note(trainer)

    def _note(self, trainer: Any) -> None:
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit_on_devices(
    configuration: Configuration, callbacks: Sequence[L.Callback] = (), ckpt_path: Path | None = None
) -> Result:
    """Fit on the simulated devices that a configuration names.

    Args:
        configuration: The configuration.
        callbacks: Further callbacks. Default: none.
        ckpt_path: The checkpoint with which the fit continues. Default: None, it begins.
    """
    return _fit(configuration, configuration.devices, callbacks, ckpt_path)


def fit_on_the_host(configuration: Configuration) -> Result:
    """Fit on as many CPUs."""
    with on_the_host():
        return _fit(configuration, ["cpu"] * len(configuration.devices), (), None)


def _fit(
    configuration: Configuration, devices: Sequence[str], callbacks: Sequence[L.Callback], ckpt_path: Path | None
) -> Result:
    torch.manual_seed(SEED)
    module = configuration.make()
    values = Values()
    trainer = quiet(
        accelerator="auto",
        strategy=configuration.strategy(),
        devices=list(devices),
        callbacks=[values, *callbacks],
        **{"max_epochs": 2, **configuration.options},
    )
    trainer.fit(module, DataLoader(Batches(list(configuration.sizes)), batch_size=None), ckpt_path=ckpt_path)
    return Result(_on_host(module.state_dict()), _states_of(trainer.optimizers), values.rows)


def _states_of(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return the tensors of all optimisers' states."""
    states: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter, entries in optimizer.state_dict()["state"].items():
            for name, value in entries.items():
                states[f"optimizer {number}, parameter {parameter}, {name}"] = value
    return _on_host(states)


def _on_host(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in values.items() if isinstance(value, Tensor)}


# Comparison


def assert_same_result(expected: Result, actual: Result, tolerance: float) -> None:
    """Compare two fits: the module, the optimisers, and the logged values.

    Args:
        expected: One fit.
        actual: The other.
        tolerance: Largest difference, relative to the size of a tensor; 0: all bits are the same.
    """
    assert actual.logged
    for part in ("state", "optimizer_states", "logged"):
        assert_equal(getattr(expected, part), getattr(actual, part), tolerance, title=part)
