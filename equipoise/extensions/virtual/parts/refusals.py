"""Refusals of steps that do more than compute, since they run as often as a process has parts or batches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.interop.distributed.processes import collective_count
from equipoise.parallel.divergence.changes import changed, marks_of

__all__ = ["checking_part", "explained_sizes", "hiding_gradients", "is_other_option"]

# What torch says of a single sample in a layer such as BatchNorm1d.
_TOO_FEW_VALUES = "more than 1 value per channel"


@contextmanager
def checking_part(module: nn.Module, step: str, *, buffers: bool = False, contents: bool = False) -> Iterator[None]:
    """Refuse, at the end of a `with` block, what would depend on the number of processes.

    Args:
        module: The user's module.
        step: The step, as the subject of a sentence.
        buffers: Whether the step may not change buffers either.
        contents: Whether all values are compared, so that changes by `data` are seen as well.

    Raises:
        StepError: If the step communicates with other processes, or changes what it may not change.
    """

    def marks() -> dict[str, Any]:
        tensors: dict[str, Tensor] = dict(module.named_parameters())
        if buffers:
            tensors |= dict(module.named_buffers())
        return marks_of(tensors, contents=contents)

    collectives = collective_count()
    noted = marks()
    yield
    if collective_count() != collectives:
        raise StepError(
            f"{step} communicates with other processes, but under strategy='virtual' a process runs it once for each of"
            " its virtual devices or batches, and others have another number of them. Leave the communication out, or"
            " take strategy='ddp'."
        )
    name = changed(noted, marks())
    if name is not None:
        raise StepError(
            f"{step} changes {name!r}, but under strategy='virtual' a process runs it once for each of its virtual"
            " devices or batches, and others have another number of them. Change it in a hook, such as"
            " `on_train_batch_end`."
        )


_GRADIENTS_LATER = (
    "but under strategy='virtual' gradients of earlier batches are kept elsewhere while it runs. Do so in a hook, such"
    " as `on_train_batch_start` or `on_before_optimizer_step`."
)


class _EarlierGradient(Tensor):
    """What a step sees as the gradient of a parameter, in the memory of the parameter. It cannot be read."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise StepError(f"`training_step` reads or changes the gradient of a parameter, {_GRADIENTS_LATER}")


@contextmanager
def hiding_gradients(parameters: Sequence[Tensor], are_there: Sequence[bool], *, begins_window: bool) -> Iterator[None]:
    """Refuse, within a `with` block, that a step reads or changes gradients of earlier batches.

    Args:
        parameters: The parameters.
        are_there: Whether each would have a gradient on one device.
        begins_window: Whether the backward after the step zeroes them; the step may do so itself.

    Raises:
        StepError: If the step assigns a gradient.
    """
    present = [parameter.grad for parameter in parameters]
    hidden = []
    for parameter, is_there in zip(parameters, are_there, strict=True):
        hidden.append(parameter.detach().as_subclass(_EarlierGradient) if is_there else None)
        parameter.grad = hidden[-1]
    try:
        yield
        for number, parameter in enumerate(parameters):
            if parameter.grad is None and begins_window:
                present[number] = None
            elif parameter.grad is not hidden[number]:
                raise StepError(f"`training_step` assigns the gradient of a parameter, {_GRADIENTS_LATER}")
    finally:
        for parameter, gradient in zip(parameters, present, strict=True):
            parameter.grad = gradient


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
