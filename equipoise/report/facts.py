"""Facts of a run that its summary and its report both state."""

import contextlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from equipoise.callbacks.progress.display import format_time
from equipoise.interop.lightning.classes import is_a, takes_iterator
from equipoise.parallel.batches.splitting import Splitter

__all__ = ["checkpoint_callbacks", "device_name", "devices_of", "format_duration", "shorten", "size_function"]


def devices_of(trainer: Any) -> list[torch.device]:
    """The devices that this process trains on, each once."""
    strategy = trainer.strategy
    return list(dict.fromkeys(map(torch.device, getattr(strategy, "devices", None) or [strategy.root_device])))


def device_name(device: torch.device) -> str:
    """A device and what it is."""
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"cpu, {platform.machine()}, {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else str(device)


def checkpoint_callbacks(trainer: Any) -> list[ModelCheckpoint]:
    """The callbacks that save checkpoints."""
    return [callback for callback in trainer.callbacks if is_a(callback, ModelCheckpoint)]


def format_duration(seconds: float) -> str:
    """A time, short ones with three digits."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 59.95 else format_time(seconds)


def size_function(trainer: Any, module: Any) -> Callable[[Any], int | None]:
    """Return a function from the batch that `on_train_batch_end` receives to the number of samples of the step.

    That function returns None where the number cannot be known.

    Args:
        trainer: Whose fit it is.
        module: The user's module.
    """
    if takes_iterator(module, "training_step"):
        return _cannot_tell  # the batch is only the last of those that the step has pulled
    return Splitter(module, getattr(trainer.strategy, "dim", 0)).size


def _cannot_tell(batch: Any) -> None: ...


def shorten(path: str) -> str:
    """The path from where the user stands, if it lies below."""
    with contextlib.suppress(ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return path
