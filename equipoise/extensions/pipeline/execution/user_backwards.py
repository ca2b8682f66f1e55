"""Backwards that a step itself runs, of which the graph of the network would be a part."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.graph import get_gradient_edge

from equipoise.errors import StepError
from equipoise.extensions.pipeline.execution.suspended_step import current_step
from equipoise.extensions.pipeline.interop.transforms import is_transformed
from equipoise.interop.distributed.backward_calls import BackwardCall, intercept_backwards

__all__ = ["backwards_through_network_refused"]


@contextmanager
def backwards_through_network_refused() -> Iterator[None]:
    """Refuse backwards of steps through the network, whose graph the stages have, within the context."""

    def run(call: BackwardCall) -> Any:
        step = current_step()
        # Graphs of transforms have ends of their own, and a step calls no network in them.
        if step is not None and not is_transformed() and _reaches(call, step.network_ends):
            raise StepError(
                "`training_step` takes gradients through the network, but under strategy='pipeline' the stages have its"
                " graph. A penalty of gradients needs the whole graph: train on one device, or with dp or ddp."
            )
        return call.run()

    release = intercept_backwards(run)
    try:
        yield
    finally:
        release()


def _reaches(call: BackwardCall, ends: frozenset[Any]) -> bool:
    """Return True if a backward reaches one of the nodes, and is not for gradients of what was computed from it."""
    seen = {get_gradient_edge(tensor).node for tensor in call.inputs if tensor.requires_grad}
    nodes: list[Any] = [tensor.grad_fn for tensor in call.outputs]
    while nodes and ends:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node in ends:
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False
