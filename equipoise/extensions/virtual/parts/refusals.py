"""Refusals of steps that do more than compute, since they run as often as a process has parts or batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.interop.distributed.processes import collective_count
from equipoise.interop.torch.modules import versions

__all__ = ["checking_part", "explained_sizes", "is_other_option"]

# What torch says of a single sample in a layer such as BatchNorm1d.
_TOO_FEW_VALUES = "more than 1 value per channel"


@contextmanager
def checking_part(module: nn.Module, step: str, *, buffers: bool) -> Iterator[None]:
    """Refuse, at the end of a `with` block, what would depend on the number of processes.

    Args:
        module: The user's module.
        step: The step, as the subject of a sentence.
        buffers: Whether the step may not change buffers either.

    Raises:
        StepError: If the step communicates with other processes, or changes what it may not change.
    """
    collectives = collective_count()
    noted = _noted(module, buffers)
    yield
    if collective_count() != collectives:
        raise StepError(
            f"{step} communicates with other processes, but under strategy='virtual' a process runs it once for each of"
            " its virtual devices or batches, and others have another number of them. Leave the communication out, or"
            " take strategy='ddp'."
        )
    present = _noted(module, buffers)
    if present != noted:
        changed = min(name for name in {*present, *noted} if present.get(name) != noted.get(name))
        raise StepError(
            f"{step} changes {changed!r}, but under strategy='virtual' a process runs it once for each of its virtual"
            " devices or batches, and others have another number of them. Change it in a hook, such as"
            " `on_train_batch_end`."
        )


@contextmanager
def explained_sizes(size: int, number: int, count: int) -> Iterator[None]:
    """Explain the error of a layer that needs several samples, in a part with one.

    Args:
        size: The number of samples of the part.
        number: The number of the part.
        count: The number of parts of a step.

    Raises:
        StepError: In its place.
    """
    try:
        yield
    except ValueError as error:
        if size > 1 or _TOO_FEW_VALUES not in str(error):
            raise
        raise StepError(
            f"Part {number} of the step has one sample, of which a layer such as BatchNorm makes no statistics:"
            f" {error}. The batch is divided into {count} parts. Let each batch have at least {2 * count} samples (with"
            " drop_last=True also the last one), or take VirtualDevicesStrategy with a smaller `count`."
        ) from error


def is_other_option(value: Any, before: Any) -> bool:
    """Return whether an option of an optimiser, such as its learning rate, has another value than before."""
    return value is not before and bool(value != before)


def _noted(module: nn.Module, buffers: bool) -> dict[str, tuple[int, int]]:
    """Return the memory and the version of each parameter, and of each buffer; new data have other memory."""
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    if buffers:
        tensors |= dict(module.named_buffers())
    counts = versions(tensors.values()) or [0] * len(tensors)
    return {name: (_memory(tensor), count) for (name, tensor), count in zip(tensors.items(), counts, strict=True)}


def _memory(tensor: Tensor) -> int:
    # Sparse tensors have none of their own, and of subclasses, such as lazy or quantised ones, not all have it.
    if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
        return tensor.data_ptr()
    return id(tensor)
