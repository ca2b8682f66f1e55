"""Gradients clipped by value, also where no parameter has one."""

from collections.abc import Iterable

from torch import Tensor, nn

__all__ = ["clip_by_value"]


def clip_by_value(parameters: Iterable[Tensor], value: float) -> None:
    """Clip each entry of the gradients in place.

    Torch's `clip_grad_value_` raises an IndexError if no parameter has a gradient, as in a process without a batch.

    Args:
        parameters: The parameters.
        value: The largest absolute value of an entry.

    Example:
        >>> clip_by_value(nn.Linear(1, 1).parameters(), 0.5)
    """
    with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
    if with_gradients:
        nn.utils.clip_grad_value_(with_gradients, value)
