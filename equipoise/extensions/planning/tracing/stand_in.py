"""Stand-ins for the trainer and its loggers, for a step that runs without either."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.extensions.planning.description.settings import StepSettings
from equipoise.strategies.single_device import SingleDeviceStrategy

__all__ = ["TrainerStandIn", "attach", "ignore"]

# Values that a module may compute with before it knows the length of a run.
_STEPS = 1000


class _SilentLogger:
    """Logger that takes every call, also in chains such as `logger.experiment["loss"].append(1)`, and is empty."""

    def __getattr__(self, name: str) -> "_SilentLogger":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> "_SilentLogger":
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    # Python would ask for the items 0, 1, 2, ..., which never end.
    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __call__(self, *args: Any, **kwargs: Any) -> "_SilentLogger":
        return self


class TrainerStandIn:
    """Attributes that modules read from a trainer during a step, as they are in the first epoch of a run on one device.

    Attributes:
        optimizers: The optimisers, once they exist.
    """

    def __init__(self, settings: StepSettings) -> None:
        self.optimizers: list[Optimizer] = []
        self.accumulate_grad_batches = settings.accumulate_grad_batches
        self.precision = str(settings.precision)

        # Where the run is.
        self.current_epoch = 0
        self.global_step = 1
        self.is_last_batch = False
        self.training = True
        self.validating = False
        self.testing = False
        self.predicting = False
        self.sanity_checking = False

        # How long it takes.
        self.max_epochs = 10
        self.min_epochs = None
        self.max_steps = -1
        self.num_training_batches = _STEPS // self.max_epochs
        self.estimated_stepping_batches = _STEPS

        # Where it computes.
        self.world_size = 1
        self.num_devices = 1
        self.num_nodes = 1
        self.global_rank = 0
        self.local_rank = 0
        self.is_global_zero = True
        self.strategy = SingleDeviceStrategy()
        self.strategy.connect([torch.device("cpu")])

        # What it keeps.
        self.logger = _SilentLogger()
        self.loggers = [self.logger]
        self.callbacks = list(settings.callbacks)
        self.callback_metrics: dict[str, Tensor] = {}
        self.logged_metrics: dict[str, Tensor] = {}
        self.datamodule = None


def attach(module: nn.Module, trainer: TrainerStandIn, on_backward: Callable[..., None]) -> None:
    """Give a module a stand-in for its trainer, and methods that need no other.

    The module is not used afterwards, so nothing is put back.

    Args:
        module: The user's module.
        trainer: The stand-in, which must live as long as the module is used.
        on_backward: Called as `manual_backward(loss)`.
    """
    methods: dict[str, Any] = {
        "log": ignore,
        "log_dict": ignore,
        "print": ignore,
        "manual_backward": on_backward,
        "optimizers": lambda use_pl_optimizer=True: _one_or_all(trainer.optimizers),
        "lr_schedulers": ignore,
        "clip_gradients": ignore,
        "all_gather": lambda data, *args, **kwargs: data,
    }
    for name, method in methods.items():
        # A method of the user's own stays.
        if _is_inherited(module, name):
            vars(module)[name] = method
    if hasattr(type(module), "trainer"):
        module.trainer = trainer  # type: ignore[assignment]


def ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _one_or_all(optimizers: list[Optimizer]) -> Any:
    """Return the only optimiser, or the list of all."""
    if len(optimizers) == 1:
        return optimizers[0]
    return optimizers


def _is_inherited(module: nn.Module, name: str) -> bool:
    """Return True for a method that the class has from Lightning, or does not have."""
    method = getattr(type(module), name, None)
    return getattr(method, "__module__", "lightning").partition(".")[0] in ("lightning", "pytorch_lightning")
