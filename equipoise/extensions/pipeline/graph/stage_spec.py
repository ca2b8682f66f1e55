"""Description of a stage that can be sent to another process, apart from the layers that it uses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from equipoise.extensions.pipeline.graph.stages import StageProgram, with_user_lines

__all__ = ["StageSpec", "describe", "find_part", "parameters_and_buffers", "rebuild", "used_parts"]


@dataclass(frozen=True)
class _Reference:
    """Reference to the result of another call."""

    name: str


def _reference_to(node: fx.Node) -> Any:
    return _Reference(node.name)


class StageSpec(NamedTuple):
    """A stage without its layers, which does not build the network's output.

    Attributes:
        calls: For each node of its graph the operation, the node's name, the target, the arguments and the user's line.
        outputs: See `StageProgram`.
    """

    calls: tuple[tuple[str, str, Any, Any, Any, str], ...]
    outputs: tuple[str, ...]


def describe(program: StageProgram) -> StageSpec:
    """Return a description of a stage, from which `rebuild` makes the same one in another process.

    Args:
        program: The stage.
    """
    calls = []
    for node in program.graph.nodes:
        # Nodes belong to a graph, which stays in this process.
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _reference_to)
        calls.append((node.op, node.name, node.target, args, kwargs, node.meta.get("line", "")))
    return StageSpec(tuple(calls), program.outputs)


def rebuild(
    spec: StageSpec,
    parts: Mapping[str, Any],
) -> StageProgram:
    """Return the stage of a description.

    Args:
        spec: Result of `describe`.
        parts: Result of `used_parts`, as it is in this process.
    """
    # 1. Create the nodes. A call refers to earlier ones only.
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def referred(leaf: Any) -> Any:
        if isinstance(leaf, _Reference):
            return nodes[leaf.name]
        return leaf

    for operation, name, target, args, kwargs, line in spec.calls:
        args_here, kwargs_here = map_aggregate((args, kwargs), referred)
        nodes[name] = graph.create_node(operation, target, args_here, kwargs_here, name)
        nodes[name].meta["line"] = line

    # 2. Compile them with the layers.
    return StageProgram(with_user_lines(fx.GraphModule(dict(parts), graph)), spec.outputs, graph)


def used_parts(
    program: StageProgram,
    root: nn.Module,
) -> dict[str, Any]:
    """Return the layers, tensors and other attributes that a stage uses, by their names in its graph.

    Args:
        program: The stage.
        root: Module to which the names refer.
    """
    parts: dict[str, Any] = {}
    for node in program.graph.nodes:
        # Other nodes use no attribute of the module.
        if node.op in ("call_module", "get_attr"):
            target = str(node.target)
            parts[target] = find_part(root, target)
    return parts


def find_part(root: nn.Module, name: str) -> Any:
    """Return a submodule, tensor or other attribute.

    Args:
        root: Module to which the name refers.
        name: Names of attributes, joined by dots; "" for the module itself.
    """
    if name == "":
        return root
    return attrgetter(name)(root)


def parameters_and_buffers(part: Any) -> Sequence[Tensor]:
    """Return the parameters and buffers of a layer, or a tensor by itself."""
    if isinstance(part, nn.Module):
        return [*part.parameters(), *part.buffers()]
    if isinstance(part, Tensor):
        return [part]
    return []
