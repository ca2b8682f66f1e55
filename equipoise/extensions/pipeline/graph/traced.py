"""A forward as a list of calls, with what they return together, and the conditions under which they are the forward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from equipoise.extensions.pipeline.forward.layer_lending import lent
from equipoise.extensions.pipeline.graph.output_structure import OutputStructure

__all__ = [
    "FOLLOWS",
    "STAGE_DEVICE",
    "STAYS",
    "CallInterpreter",
    "Condition",
    "Traced",
    "copy_call",
    "on_device",
]

# Key in a call's `meta`: True if its value stays in its stage. That is a container, whose tensors are values of other
# calls; or a tensor that is not on the device of the stage, such as the sizes of a packed sequence.
STAYS = "stays"
# Key in a call's `meta`: True if the call belongs to the stage of the call before it, such as a check of that one.
FOLLOWS = "follows"


class _StageDevice:
    """Stands for the device of a stage in the arguments of a call."""

    def __repr__(self) -> str:
        return "STAGE_DEVICE"

    # A copy, also one by pickle, is the same object.
    def __reduce__(self) -> str:
        return "STAGE_DEVICE"


STAGE_DEVICE = _StageDevice()


# Says of the tensors of another call whether a forward with these would do the same.
Condition = Callable[[Sequence[Tensor]], bool]


@dataclass(frozen=True, eq=False)
class Traced:
    """The calls of a forward.

    Attributes:
        root: Module to which the names in the graph refer.
        graph: The calls. Its output is a tuple of tensors.
        opaque: For each submodule that stayed whole the reason.
        output: Builds the network's output from these tensors.
        conditions: Conditions on the tensors of another call, under which it makes the same calls.
        changes: For each call that changed arguments in place when it ran, the values that it changed.
    """

    root: nn.Module
    graph: fx.Graph
    opaque: Mapping[str, str]
    output: OutputStructure
    conditions: Sequence[Condition]
    changes: Mapping[fx.Node, set[fx.Node]]

    @property
    def calls(self) -> list[fx.Node]:
        """All computations, in order."""
        # Inputs and output compute nothing.
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]

    def only_node(self, op: str) -> fx.Node:
        """Return the node of this kind, of which the graph has one: "placeholder" or "output"."""
        node: fx.Node
        (node,) = self.graph.find_nodes(op=op)
        return node

    @property
    def signature(self) -> tuple[str, ...]:
        """Description of all calls, equal for forwards that make the same calls in the same order."""
        return tuple(f"{node.name} {node.op} {node.target}" for node in self.calls)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if a call with these tensors makes the same calls.

        Args:
            tensors: Tensors of a call with the same structure.
        """
        return all(condition(tensors) for condition in self.conditions)


class CallInterpreter(fx.Interpreter):
    """Run recorded calls one by one on a device, wherever their layers are. Each layer is lent while it is called.

    Args:
        root: Module to which the names in the graph refer.
        graph: The calls.
        device: The device.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, device: torch.device) -> None:
        super().__init__(root, graph=graph)
        self.device = device
        # Errors keep the messages of the calls that raise them.
        self.extra_traceback = False

    def layer_of(self, node: fx.Node) -> nn.Module | None:
        """Return the layer that a call runs; None if it runs none."""
        if node.op != "call_module":
            return None
        return self.module.get_submodule(str(node.target))

    def run_node(self, node: fx.Node) -> Any:
        """Return the value of a call."""
        with lent(self.layer_of(node), self.device):
            return super().run_node(node)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return what a call looks up, on the device."""
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, Tensor):
            return value
        # A copy, so that the parameter itself does not move.
        return value.detach().to(self.device).requires_grad_(value.requires_grad)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        """Return arguments with values in the place of calls."""
        return super().map_nodes_to_values(on_device(self.device, args), n)


def on_device(device: torch.device, value: Any) -> Any:
    """Return arguments of a call with a device in the place of `STAGE_DEVICE`.

    Args:
        device: The device.
        value: The arguments, which may contain calls.
    """

    def placed(leaf: Any) -> Any:
        if leaf is STAGE_DEVICE:
            return device
        return leaf

    return map_aggregate(value, placed)


def copy_call(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], device: torch.device) -> fx.Node:
    """Return a copy of a call in another graph.

    Args:
        graph: The other graph.
        node: The call.
        copies: The copies of earlier calls there.
        device: Device in the place of `STAGE_DEVICE`.
    """
    copied_arguments: Any = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    args, kwargs = on_device(device, copied_arguments)
    copy = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
    copy.meta.update(node.meta)
    return copy
