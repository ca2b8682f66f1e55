"""Private names of torch's automatic differentiation for gradients that processes exchange.

`tests/interop/torch/test_autograd.py` notices when one of them changes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.interop.adapters import find

__all__ = ["BackwardCall", "gradients_here", "intercept_backwards", "is_summed"]

_will_engine_execute_node: Callable[[Any], bool] | None = find("torch._C._will_engine_execute_node")

# Whether `gradients_here` runs. A backward may call hooks in another thread.
_RUNS_HERE: list[bool] = []


def gradients_here(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Return what `torch.autograd.grad` returns, of this process alone where a strategy would exchange it.

    Args:
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    _RUNS_HERE.append(True)
    try:
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(*args, **kwargs)
        return gradients
    finally:
        _RUNS_HERE.pop()


def is_summed(leaf_node: Any) -> bool:
    """Return False if the user's `torch.autograd.grad` returns the gradient of a leaf, which has been computed.

    Args:
        leaf_node: The node at which the leaf receives its gradient. Nothing public tells what becomes of it.
    """
    if _will_engine_execute_node is None or _RUNS_HERE:
        return True
    try:
        return _will_engine_execute_node(leaf_node)
    except RuntimeError:
        # It answers for no leaf whose gradient is returned.
        return False


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


def intercept_backwards(around: Callable[[BackwardCall], Any]) -> Callable[[], None]:
    """Let a function run every backward that Python code begins in this process: `torch.autograd.grad` and others.

    No public hook sees what `torch.autograd.grad` returns, nor the end of a backward.

    Args:
        around: Function that receives a backward and returns its result.

    Returns:
        Function that ends this.
    """
    original = getattr(torch.autograd, _ENGINE_CALL)

    def run(
        outputs: Any, gradients: Any, retain: bool, create: bool, inputs: Sequence[Any], *args: Any, **kw: Any
    ) -> Any:
        compute = partial(original, outputs, gradients, retain, create, inputs, *args, **kw)
        if _RUNS_HERE:
            return compute()
        return around(BackwardCall(compute, outputs, inputs, create, kw["accumulate_grad"]))

    setattr(torch.autograd, _ENGINE_CALL, run)
    return partial(setattr, torch.autograd, _ENGINE_CALL, original)
