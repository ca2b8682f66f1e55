"""Private names of torch's automatic differentiation, each with what happens without it.

`tests/interop/torch/test_autograd.py` notices when one of them changes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from equipoise.interop.adapters import find, find_if_tested

__all__ = [
    "is_changed",
    "is_in_backward",
    "is_in_backward_or_compiler",
    "next_node_number",
    "number_of_backward",
    "number_of_node",
    "run_backward",
    "run_backward_in_modes",
    "running_node",
    "version_of",
]

# `Tensor.backward` checks its arguments and creates the first gradient anew, which costs as much as the forward of a
# small layer. No public function leaves that out.
_engine_run_backward: Callable[..., Any] | None = find_if_tested("torch.autograd.graph._engine_run_backward")
_has_versions = find("torch.Tensor._version") is not None
_get_sequence_nr: Callable[[], int] | None = find("torch.autograd._get_sequence_nr")
_tracing_context: Any = find("torch._guards.TracingContext")
_current_graph_task_id: Callable[[], int] | None = find("torch._C._current_graph_task_id")
_current_autograd_node: Callable[[], Any] | None = find("torch._C._current_autograd_node")


def run_backward(loss: Tensor, gradient: Tensor) -> None:
    """Run the backward of a scalar loss, with the results of `loss.backward(gradient)` and fewer checks.

    Args:
        loss: A tensor without dimensions.
        gradient: The gradient with which the backward begins; a tensor like the loss.

    Raises:
        RuntimeError: Torch's own, if the loss has no graph or the backward fails.
    """
    # Subclasses of tensors have a backward of their own, and so have modes such as `torch.set_default_device`.
    if _engine_run_backward is None or has_torch_function((loss,)):
        loss.backward(gradient)  # type: ignore[no-untyped-call]
        return
    # The graph is freed, no other graph is made, and all leaves are inputs, as `backward` has it by default.
    _engine_run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def run_backward_in_modes(loss: Tensor, gradient: Tensor | None = None) -> None:
    """Run a backward of a scalar loss whose recomputed forwards run in the modes of torch's functions of now.

    `Tensor.backward` ends these modes; nothing public keeps them.

    Args:
        loss: A tensor without dimensions.
        gradient: The gradient with which the backward begins. Default: None, which is 1.
    """
    if _engine_run_backward is None:
        loss.backward(gradient)  # type: ignore[no-untyped-call]
        return
    # A thread of autograd would have no modes.
    with torch.autograd.set_multithreading_enabled(False):
        seed = torch.ones_like(loss) if gradient is None else gradient
        _engine_run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def is_changed(tensor: Tensor) -> bool:
    """Return True if an operation in place may have changed a tensor since its creation; nothing public shows it."""
    return not _has_versions or tensor._version != 0


def version_of(tensor: Tensor) -> Any:
    """Return what differs after an operation in place on a tensor; nothing public does."""
    # Tensors that were made in inference mode have no version.
    return tensor._version if _has_versions and not tensor.is_inference() else object()


def is_in_backward() -> bool:
    """Return True within a backward, also in what is called at its end; nothing public tells it."""
    return number_of_backward() != -1


def number_of_backward() -> int:
    """Return the number of the backward that runs, which no other one has; -1 if none runs. Nothing public tells it."""
    if _current_graph_task_id is None:
        return -1
    return int(_current_graph_task_id())


def is_in_backward_or_compiler() -> bool:
    """Return True within a backward, what is called at its end included, or while the compiler reads tensors.

    Nothing public tells either: `torch.compiler.is_compiling` is about code that is compiled.
    """
    if _tracing_context is not None and _tracing_context.try_get() is not None:
        return True
    return is_in_backward()


# Which part of a forward has made a node of the graph shows in its number alone: nodes are numbered in each thread, in
# the order in which they are made. No public name tells a number, or the node whose backward runs.


def next_node_number() -> int:
    """Return the number of the next node that this thread adds to a graph; always 0 if torch does not show it.

    Example:
        >>> import torch
        >>> first = next_node_number()
        >>> product = torch.ones(1, requires_grad=True) * 2
        >>> number_of_node(product.grad_fn) == first, next_node_number() == first + 1
        (True, True)
    """
    return 0 if _get_sequence_nr is None else int(_get_sequence_nr())


def number_of_node(node: Any) -> int:
    """Return the number of a node of the graph; a very large one for the node at which a leaf receives its gradient."""
    return int(node._sequence_nr())


def running_node() -> Any:
    """Return the node whose backward runs in this thread; None if there is none, or torch does not show its number."""
    if _current_autograd_node is None or _get_sequence_nr is None:
        return None
    return _current_autograd_node()
