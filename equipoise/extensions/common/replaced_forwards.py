"""Forwards that stand in the place of a module's own for the time of a run, such as compiled ones.

A strategy that looks into a network takes the call of such a module as one. While it records or measures the network,
the module's own forward computes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

__all__ = ["has_replaced_forward", "own_forwards", "wants_own_forwards"]

# The attribute that marks a function as such a forward. It is bound to the module, as a method.
_MARK = "replaces_forward"

_wants_own: ContextVar[bool] = ContextVar("wants_own_forwards", default=False)


def has_replaced_forward(module: nn.Module) -> bool:
    """Return True if another forward stands in the place of a module's own."""
    function = getattr(vars(module).get("forward"), "__func__", None)
    return getattr(function, _MARK, False)


@contextmanager
def own_forwards() -> Iterator[None]:
    """Let each module compute by its own forward in a `with` block of this thread."""
    token = _wants_own.set(True)
    try:
        yield
    finally:
        _wants_own.reset(token)


def wants_own_forwards() -> bool:
    """Return True in a `with` block of `own_forwards`."""
    return _wants_own.get()
