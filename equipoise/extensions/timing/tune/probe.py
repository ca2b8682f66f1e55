"""StepsProbe: times a window of the steps of a fit, and ends the fit after it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from equipoise.callbacks.callback import Callback
from equipoise.errors import ConfigurationError
from equipoise.extensions.timing.limits import find_limit
from equipoise.extensions.timing.step_times import StepTimes
from equipoise.interop.torch.loaders import with_arguments
from equipoise.parallel.communication.agreements import is_true_in_any

__all__ = ["StepsProbe", "Window"]

_FETCH = "[_TrainingEpochLoop].train_dataloader_next"
# Processes agree on the end of a window that ends by time. Each agreement is an exchange.
_EVERY = 10


@dataclass(frozen=True, kw_only=True)
class Window:
    """The steps of a trial that are timed.

    Attributes:
        first_steps: Number of steps before it.
        steps: Number of its steps.
        seconds: Seconds that it takes at least; with any, `steps` is the fewest number. Default: 0.
        patience: Seconds after which it waits for no validation. Default: 0.
        most_seconds: Seconds after which it ends in any case. Default: no bound.
    """

    first_steps: int
    steps: int
    seconds: float = 0.0
    patience: float = 0.0
    most_seconds: float = float("inf")


class StepsProbe(Callback):
    """Time a window of steps by `StepTimes`, write the result into a file, and end the fit.

    Args:
        times: The callback, whose first steps are those of the window. It comes before this one.
        window: The window.
        file: The file; rank 0 writes it.
        loader: Arguments of the training DataLoader that are replaced.
    """

    def __init__(self, times: StepTimes, window: Window, file: Path, loader: Mapping[str, Any]) -> None:
        self._times = times
        self._window = window
        self._file = file
        self._loader = loader
        self._batches = 0
        self._has_validated = False
        self._is_done = False
        self._begun = 0.0

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Let the data module or the module return a loader with other arguments."""
        if not self._loader:
            return
        owner: Any = trainer.datamodule or pl_module
        request = owner.train_dataloader

        def changed() -> Any:
            loader = request()
            if not isinstance(loader, DataLoader):
                raise ConfigurationError(f"the training data are no DataLoader, but a {type(loader).__name__}")
            return with_arguments(loader, self._loader)

        owner.train_dataloader = changed

    def wrap_call(self, trainer: Any, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Look at the time before each batch is read."""
        if action != _FETCH:
            return function

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._look(trainer)
            result = function(*args, **kwargs)
            self._batches += 1
            return result

        return counted

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note that there was a validation in the window."""
        self._has_validated = self._batches > self._window.first_steps

    # The loop reads the value, though the declared hook has none.
    def on_train_batch_start(  # type: ignore[override]
        self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> int:
        """Leave out the batch that follows the window, and a validation after it."""
        return -int(self._is_done)

    def _look(self, trainer: Any) -> None:
        """Begin or end the window, if it is time."""
        measured = self._batches - self._window.first_steps
        if measured == 0:
            _wait(trainer)
            self._begun = perf_counter()
        elif measured > 0 and not self._is_done and self._is_over(trainer, measured):
            _wait(trainer)
            self._is_done = True
            trainer.should_stop = True
            self._times.conclude(trainer)
            if trainer.is_global_zero:
                self._write(trainer)

    def _is_over(self, trainer: Any, measured: int) -> bool:
        window = self._window
        if not window.seconds:
            return measured == window.steps
        # Their clocks differ.
        if measured % _EVERY and trainer.world_size > 1:
            return False
        elapsed = perf_counter() - self._begun
        is_over = measured >= window.steps and elapsed >= window.seconds
        if trainer.enable_validation and not self._has_validated:
            is_over = is_over and elapsed >= window.patience
        is_over = is_over or elapsed >= window.most_seconds
        return is_true_in_any(is_over, trainer.strategy.processes)

    def _write(self, trainer: Any) -> None:
        times = self._times.times
        facts = self._times.facts
        assert times is not None
        assert facts is not None
        limit = find_limit(times, facts)
        result = {
            "seconds": times.seconds,
            "steps": times.steps,
            "shares": times.shares(),
            "facts": asdict(facts),
            "limit": limit and asdict(limit),
            "device": trainer.strategy.root_device.type,
        }
        self._file.write_text(json.dumps(result), encoding="utf-8")


def _wait(trainer: Any) -> None:
    """Wait for the device, whose work the time would not contain otherwise."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.root_device)
