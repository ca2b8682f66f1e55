"""Private names of torch's automatic differentiation for gradients that processes exchange.

`tests/interop/torch/test_autograd.py` notices when one of them changes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from equipoise.interop.adapters import find

__all__ = ["BackwardCall", "destination", "gradients_here", "intercept_backwards", "is_run_here"]

_will_engine_execute_node: Callable[[Any], bool] | None = find("torch._C._will_engine_execute_node")

# The threads in which `gradients_here` runs.
_RUN_HERE: list[int] = []


def gradients_here(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Return what `torch.autograd.grad` returns, of this process alone where a strategy would exchange it.

    Args:
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    thread = get_ident()
    _RUN_HERE.append(thread)
    try:
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(*args, **kwargs)
        return gradients
    finally:
        _RUN_HERE.remove(thread)


def is_run_here() -> bool:
    """Return whether a backward of `gradients_here` runs, in whichever thread: one on a GPU calls hooks in its own."""
    return bool(_RUN_HERE)


def destination(leaf_node: Any) -> Literal["grad", "caller", ""]:
    """Return where the backward that runs puts the gradient of a leaf: in `.grad`, or to the caller of `grad`.

    Args:
        leaf_node: The node at which the leaf receives its gradient. Nothing public tells what becomes of it.

    Returns:
        "" if the backward does not come there.
    """
    if _will_engine_execute_node is None or is_run_here():
        return "grad"
    try:
        return "grad" if _will_engine_execute_node(leaf_node) else ""
    except RuntimeError:
        # It answers for no leaf whose gradient is returned.
        return "caller"


# Every backward that Python code begins, by whatever public function, calls the engine under this name.
_ENGINE_CALL = "_engine_run_backward"


class BackwardCall(NamedTuple):
    """A backward that is about to run.

    Attributes:
        run: Function that runs it, and returns the gradients of the inputs.
        outputs: The tensors at which it begins.
        inputs: What the gradients are for. Empty: all leaves.
        creates_graph: Whether the gradients get a graph.
        accumulates: Whether gradients are added to `.grad`, as by `backward`; False: they are returned, as by `grad`.
    """

    run: Callable[[], Any]
    outputs: Sequence[Tensor]
    inputs: Sequence[Any]
    creates_graph: bool
    accumulates: bool

    def leaves(self) -> list[Tensor | None]:
        """Return the inputs as tensors; the node of an edge names the leaf that it belongs to, or none."""
        return [value if isinstance(value, Tensor) else getattr(value.node, "variable", None) for value in self.inputs]


# What runs each backward, the last one begun first; and torch's own function.
_AROUND: list[Callable[[BackwardCall], Any]] = []
_run_in_engine: Callable[..., Any] | None = find(f"torch.autograd.{_ENGINE_CALL}")


def intercept_backwards(around: Callable[[BackwardCall], Any]) -> Callable[[], None]:
    """Let a function run every backward that Python code begins in this process: `torch.autograd.grad` and others.

    No public hook sees what `torch.autograd.grad` returns, nor the end of a backward. Of several such functions the one
    that was given last runs them, until it ends. A torch without the private name calls none of them; features that
    cannot do without it are refused where they are chosen.

    Args:
        around: Function that receives a backward and returns its result.

    Returns:
        Function that ends this.
    """
    if _run_in_engine is None:
        return lambda: None
    _AROUND.append(around)
    setattr(torch.autograd, _ENGINE_CALL, _run)

    def end() -> None:
        _AROUND.remove(around)
        if not _AROUND:
            setattr(torch.autograd, _ENGINE_CALL, _run_in_engine)

    return end


def _run(outputs: Any, gradients: Any, retain: bool, create: bool, inputs: Sequence[Any], *args: Any, **kw: Any) -> Any:
    assert _run_in_engine is not None
    compute = partial(_run_in_engine, outputs, gradients, retain, create, inputs, *args, **kw)
    # Another thread may have ended the last one meanwhile.
    around = _AROUND[-1:]
    if get_ident() in _RUN_HERE or not around:
        return compute()
    return around[0](BackwardCall(compute, outputs, inputs, create, kw["accumulate_grad"]))
