"""Facts of a run that its summary and its report both state."""

import contextlib
import platform
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_a, takes_iterator
from equipoise.memory.devices import peak_of_process
from equipoise.parallel.batches.splitting import Splitter

__all__ = [
    "checkpoint_callbacks",
    "device_name",
    "devices_of",
    "memory_logger_of",
    "peaks_of",
    "size_function",
]


def devices_of(trainer: Any) -> list[torch.device]:
    """Return the devices on which this process trains, without repetition."""
    strategy = trainer.strategy
    # Lightning's strategies have a root device only.
    names = getattr(strategy, "devices", None) or [strategy.root_device]
    devices = [torch.device(name) for name in names]
    return list(dict.fromkeys(devices))


def device_name(device: torch.device) -> str:
    """Return the name of a device and its kind."""
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return str(device)
    threads = torch.get_num_threads()
    ending = "s" if threads > 1 else ""
    return f"cpu, {platform.machine()}, {threads} thread{ending}"


def checkpoint_callbacks(trainer: Any) -> list[ModelCheckpoint]:
    """Return the callbacks that save checkpoints."""
    return [callback for callback in trainer.callbacks if is_a(callback, ModelCheckpoint)]


def memory_logger_of(trainer: Any) -> Any:
    """Return the first callback with a time line of memory, None without one."""
    for callback in trainer.callbacks:
        # Callbacks of others may use the name for something else.
        if isinstance(getattr(callback, "timeline", None), list):
            return callback
    return None


def peaks_of(trainer: Any) -> dict[str, int]:
    """Return the peak of each device in bytes: that of the steps where a MemoryLogger has read it, else of the process.

    Args:
        trainer: The trainer of the fit.
    """
    peaks: dict[str, int] = {}
    for point in getattr(memory_logger_of(trainer), "timeline", ()):
        # Some devices keep no peak.
        nbytes = point.allocated if point.peak is None else point.peak
        peaks[point.device] = max(peaks.get(point.device, 0), nbytes)
    if peaks:
        return peaks
    for device in devices_of(trainer):
        # Some kinds of devices have no readings.
        with contextlib.suppress(ConfigurationError):
            peak = peak_of_process(device)
            if peak is not None:
                peaks[str(device)] = peak
    return peaks


def size_function(trainer: Any, module: Any) -> Callable[[Any], int | None]:
    """Return a function from the batch that `on_train_batch_end` receives to the number of samples of the step.

    That function returns None if the number is unknown.

    Args:
        trainer: The trainer of the fit.
        module: The user's module.
    """
    # The hook receives only the last of the batches that such a step pulls.
    if takes_iterator(module, "training_step"):
        return _unknown_size
    return Splitter(module, getattr(trainer.strategy, "dim", 0)).size


def _unknown_size(batch: Any) -> None: ...
