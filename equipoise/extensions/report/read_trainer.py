"""Devices, memory and checkpoints of a trainer, ours or Lightning's, which the summary and the report both state."""

import contextlib
import platform
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from equipoise.errors import ConfigurationError
from equipoise.formats import format_path
from equipoise.interop.lightning.classes import is_a
from equipoise.memory.devices import peak_of_process

__all__ = ["best_scores", "device_name", "devices_of", "memory_logger_of", "monitored", "peaks_of", "saved_checkpoints"]


def devices_of(trainer: Any) -> list[torch.device]:
    """Return the devices on which this process trains, without repetition."""
    strategy = trainer.strategy
    # Lightning's strategies have a root device only.
    names = getattr(strategy, "devices", None) or [strategy.root_device]
    return list(dict.fromkeys(torch.device(name) for name in names))


def device_name(device: torch.device) -> str:
    """Return the name of a device and its kind."""
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return str(device)
    threads = torch.get_num_threads()
    ending = "s" if threads > 1 else ""
    return f"cpu, {platform.machine()}, {threads} thread{ending}"


def best_scores(trainer: Any) -> list[tuple[str, float]]:
    """Return the best value of each monitored metric, under a name such as "best val_loss"."""
    scores = []
    for callback in _checkpoint_callbacks(trainer):
        if callback.monitor and callback.best_model_score is not None:
            scores.append((f"best {callback.monitor}", float(callback.best_model_score)))
    return scores


def monitored(trainer: Any) -> dict[str, str]:
    """Return "min" or "max" for each metric that a checkpoint callback monitors."""
    modes = {}
    for callback in _checkpoint_callbacks(trainer):
        if callback.monitor:
            modes[callback.monitor] = callback.mode
    return modes


def saved_checkpoints(trainer: Any) -> list[tuple[str, str]]:
    """Return the paths of each callback's best and last checkpoint, with what they are before them."""
    checkpoints = []
    for callback in _checkpoint_callbacks(trainer):
        # Without a value to monitor, the best one is the last.
        last = callback.last_model_path
        if not callback.monitor:
            last = last or callback.best_model_path
        elif callback.best_model_path:
            checkpoints.append(("best checkpoint", format_path(callback.best_model_path)))
        if last:
            checkpoints.append(("last checkpoint", format_path(last)))
    return checkpoints


def _checkpoint_callbacks(trainer: Any) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.callbacks if is_a(callback, ModelCheckpoint)]


def memory_logger_of(trainer: Any) -> Any:
    """Return the first callback with a time line of memory, None without one."""
    for callback in trainer.callbacks:
        # Callbacks of others may use the name for something else.
        if isinstance(getattr(callback, "timeline", None), list):
            return callback
    return None


def peaks_of(trainer: Any) -> dict[str, int]:
    """Return the peak of each device in bytes, of the steps where a MemoryLogger has read it, else of the process."""
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
