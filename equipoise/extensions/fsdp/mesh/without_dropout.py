"""Dropout left out for the time of a comparison: a cut layer draws numbers for its part, and a whole one for all."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["DROPOUTS", "without_dropout"]

_F = nn.functional
# Functions that return their input if they drop nothing, and those with a probability among their arguments.
DROPOUTS = {
    _F.dropout,
    _F.dropout1d,
    _F.dropout2d,
    _F.dropout3d,
    _F.alpha_dropout,
    _F.feature_alpha_dropout,
    torch.dropout,
}
_WITH_PROBABILITY = {_F.scaled_dot_product_attention, _F.multi_head_attention_forward}
# The place of that argument of a function of C++, whose signature cannot be read.
_PLACE_IN_ATTENTION = 4


class _WithoutDropout(TorchFunctionMode):
    """Lets the functions of torch drop nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _WITH_PROBABILITY:
            args = _without_probability(func, args, kwargs)
        return func(*args, **kwargs)


def _without_probability(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the positional arguments with a probability of 0; among the keyword arguments it is set."""
    place = _PLACE_IN_ATTENTION
    if func is _F.multi_head_attention_forward:
        place = [*inspect.signature(func).parameters].index("dropout_p")
    if len(args) > place:
        return (*args[:place], 0.0, *args[place + 1 :])
    kwargs["dropout_p"] = 0.0
    return args


@contextmanager
def without_dropout() -> Iterator[None]:
    """Leave dropout out of forwards in a `with` block of this thread.

    Example:
        >>> with without_dropout():
        ...     nn.Dropout(0.5)(torch.ones(2))
        tensor([1., 1.])
    """
    with _WithoutDropout():
        yield
