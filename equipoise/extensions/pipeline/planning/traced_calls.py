"""Calls of a traced forward, run one by one on any device."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.graph.stage_spec import find_part, parameters_and_buffers
from equipoise.extensions.pipeline.graph.traced import Traced

__all__ = [
    "layer_of",
    "now",
    "output_of",
    "part_of",
    "run_call",
    "used_tensors",
]


def run_call(
    node: fx.Node,
    root: nn.Module,
    args: Any,
    kwargs: Any,
    device: torch.device,
) -> Any:
    """Run one call and return its value.

    Args:
        node: The call.
        root: Root of the traced forward, to which the names of layers and tensors refer.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        device: Device for a parameter or buffer that the call looks up.
    """
    target = node.target
    # The kinds of torch.fx's nodes.
    if node.op == "call_module":
        layer = root.get_submodule(str(target))
        return layer(*args, **kwargs)
    if node.op == "call_method":
        method = getattr(args[0], str(target))
        return method(*args[1:], **kwargs)
    if node.op == "get_attr":
        value = find_part(root, str(target))
        if not isinstance(value, Tensor):
            return value
        # A copy, so that the parameter itself does not move.
        return value.detach().to(device).requires_grad_(value.requires_grad)
    assert callable(target)
    return target(*args, **kwargs)


def output_of(traced: Traced, values: Mapping[fx.Node, Any]) -> Any:
    """Return the output of a forward.

    Args:
        traced: The forward.
        values: Values of its calls.
    """
    output = traced.only_node("output")
    tensors: Any = fx.map_arg(output.args[0], values.__getitem__)
    return traced.output.fill(tensors)


def part_of(node: fx.Node, root: nn.Module) -> Any:
    """Return the layer that a call runs, or what it looks up: a parameter, for instance; None for other calls."""
    if node.op in ("call_module", "get_attr"):
        return find_part(root, str(node.target))
    return None


def layer_of(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """Return the layer that a call runs; None if it runs none."""
    if node.op != "call_module":
        return None
    return root.get_submodule(str(node.target))


def used_tensors(traced: Traced) -> set[int]:
    """Return the parameters and buffers that a forward uses, by their ids."""
    used: set[int] = set()
    for node in traced.calls:
        tensors = parameters_and_buffers(part_of(node, traced.root))
        used.update(map(id, tensors))
    return used


def now(device: torch.device) -> float:
    """Return the time in seconds, once a device has finished all of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
