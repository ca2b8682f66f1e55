"""A stage as it is sent to its process: its calls and the layers that they use."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from equipoise.pipeline.graph.stages import StageProgram

__all__ = ["StageSpec", "describe", "rebuild", "tensors_of", "used_parts"]


class _Value(NamedTuple):
    """A value that another call makes."""

    name: str


class StageSpec(NamedTuple):
    """A stage without its layers.

    Attributes:
        calls: For each node of its graph the operation, the node's name, the target and the arguments.
        inputs, outputs: See `StageProgram`.
    """

    calls: tuple[tuple[str, str, Any, Any, Any], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def describe(program: StageProgram) -> StageSpec:
    """What another process needs to make a stage again, beside `used_parts`."""
    calls = tuple(
        (node.op, node.name, node.target, _plain(node.args), _plain(dict(node.kwargs))) for node in program.graph.nodes
    )
    return StageSpec(calls, program.inputs, program.outputs)


def rebuild(recipe: StageSpec, parts: Mapping[str, Any]) -> StageProgram:
    """Makes a stage.

    Args:
        recipe: What `describe` returned.
        parts: What `used_parts` returned, in this process.
    """
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for operation, name, target, args, kwargs in recipe.calls:
        args, kwargs = _filled(args, nodes), _filled(kwargs, nodes)
        nodes[name] = graph.create_node(operation, target, args, kwargs, name=name)
    program = fx.GraphModule(dict(parts), graph)
    return StageProgram(program.forward, recipe.inputs, recipe.outputs, graph)


def used_parts(program: StageProgram, root: nn.Module) -> dict[str, Any]:
    """The layers, tensors and other attributes that a stage uses, by their names in its graph."""
    found: dict[str, Any] = {}
    for node in program.graph.nodes:
        if node.op in ("call_module", "get_attr"):
            part: Any = root
            for name in str(node.target).split("."):
                part = getattr(part, name)
            found[str(node.target)] = part
    return found


def tensors_of(part: Any) -> Sequence[Tensor]:
    """The parameters and buffers of a layer, or a tensor by itself."""
    if isinstance(part, nn.Module):
        return [*part.parameters(), *part.buffers()]
    return [part] if isinstance(part, Tensor) else []


def _plain(value: Any) -> Any:
    """Arguments with names in the place of nodes."""
    if isinstance(value, fx.Node):
        return _Value(value.name)
    return _mapped(_plain, value)


def _filled(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, _Value):
        return nodes[value.name]
    return _mapped(lambda item: _filled(item, nodes), value)


def _mapped(function: Any, value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    if isinstance(value, tuple):
        return tuple(map(function, value))
    if isinstance(value, list):  # those of fx are a class of their own
        return list(map(function, value))
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(function(value.start), function(value.stop), function(value.step))
    return value
