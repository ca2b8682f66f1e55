"""Cut a traced forward into stages, each a module that shares the network's layers.

What a stage hands on is a list of values: what it or an earlier stage made and a later one, or the end, needs. Skip
connections and tuples so pass through the stages between.
"""

import enum
import numbers
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.errors import StepError
from equipoise.parallel.batches.splitting import rebuild
from equipoise.pipeline.graph.tracing import Traced, writes_in_place

__all__ = [
    "StageProgram",
    "check_exchanged",
    "crossing",
    "homes_of",
    "make_stages",
    "map_tensors",
    "map_values",
    "may_cut",
    "modules_of",
    "names_of",
    "owners",
    "plain",
    "taking_inputs",
    "with_parents",
]

_VIEWS = {"chunk", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "getattr", "getitem", "mT"}
_VIEWS |= {"movedim", "narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes", "t", "to", "transpose"}
_VIEWS |= {"unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as", "type_as", "float", "double", "half", "cpu"}
_VIEWING_LAYERS = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class StageProgram:
    """The calls of one stage.

    Attributes:
        run: Takes the stage's inputs and returns what it hands on.
        inputs: The names of the values it takes.
        outputs: The names of the values it hands on; of the last stage, none: it returns the network's output.
        graph: Its calls, where they were traced.
    """

    def __init__(
        self, run: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str], graph: fx.Graph | None = None
    ) -> None:
        self.run, self.inputs, self.outputs = run, tuple(inputs), tuple(outputs)
        self.graph = fx.Graph() if graph is None else graph


def crossing(traced: Traced, ends: Sequence[int]) -> list[list[fx.Node]]:
    """For each cut the values that pass it, in order.

    Args:
        traced: The forward.
        ends: For each stage but the last the index of the call after its last.
    """
    calls = traced.calls
    order = {node: index for index, node in enumerate(calls)}
    last_use: dict[fx.Node, int] = {}
    for node in traced.graph.nodes:
        at = len(calls) if node.op == "output" else order.get(node, -1)
        for used in node.all_input_nodes:
            last_use[used] = max(last_use.get(used, -1), at)
    return [
        [node for node in traced.graph.nodes if order.get(node, -1) < end <= last_use.get(node, -1)] for end in ends
    ]


def may_cut(traced: Traced) -> list[bool]:
    """For each call whether a stage may end with it.

    A stage begins with leaves of autograd, which nothing may change in place, and what a call makes in place it must
    make in the stage of its argument, and of what its argument may be a view of.
    """
    calls = traced.calls
    taking = taking_inputs(traced)
    cuts = crossing(traced, range(1, len(calls) + 1))
    order = {node: index for index, node in enumerate(calls)}
    changed: list[tuple[fx.Node, int]] = []
    for node in calls:
        if node in traced.writing or writes_in_place(node, traced.root):
            changed += [(seen, order[node]) for used in node.all_input_nodes for seen in _seen_through(used, traced)]
    answer = []
    for index in range(len(calls)):
        passing = set(cuts[index])
        answer.append(index >= taking and not any(argument in passing and at > index for argument, at in changed))
    return answer


def taking_inputs(traced: Traced) -> int:
    """How many calls at the beginning only take the network's arguments."""
    return next(
        (index for index, node in enumerate(traced.calls) if node.all_input_nodes[:1] != _given(traced)),
        len(traced.calls),
    )


def _given(traced: Traced) -> list[fx.Node]:
    return [node for node in traced.graph.nodes if node.op == "placeholder"]


def _seen_through(node: fx.Node, traced: Traced) -> Iterator[fx.Node]:
    """A value, and those that it may be a view of."""
    while True:
        yield node
        called = traced.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        name = str(getattr(node.target, "__name__", node.target))
        looks = isinstance(called, _VIEWING_LAYERS) if called is not None else name in _VIEWS
        if node.op in ("placeholder", "get_attr") or not looks or not node.all_input_nodes:
            return
        node = node.all_input_nodes[0]


Shadowed = Callable[[int, fx.Node], nn.Module | None]


def make_stages(traced: Traced, ends: Sequence[int], shadow: Shadowed | None = None) -> list[StageProgram]:
    """Cuts a forward.

    Args:
        traced: The forward.
        ends: For each stage the index of the call after its last.
        shadow: For a stage and a call what is called there instead of the network's own; None for that itself. A
            parameter or buffer is the attribute `value` of what stands for it. Default: always that itself.
    """
    passing = crossing(traced, ends[:-1])
    (given,) = _given(traced)
    inputs: list[list[fx.Node]] = [[given], *passing]
    calls, stages = traced.calls, []
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    for stage, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        graph, copies, shadows = fx.Graph(), {}, {}
        for node in inputs[stage]:
            copies[node] = graph.placeholder(node.name)
        for node in calls[first:end]:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if shadow is not None and (instead := shadow(stage, node)) is not None:
                shadows[copies[node]] = instead
        last = stage == len(ends) - 1
        handed_on = [] if last else passing[stage]
        made = fx.map_arg(output.args[0], copies.__getitem__) if last else [copies[node] for node in handed_on]
        graph.output(made)
        program = fx.GraphModule(traced.root, graph)
        program.training = traced.root.training
        _exchange(program, shadows)
        names = [node.name for node in inputs[stage]]
        stages.append(StageProgram(program.forward, names, [node.name for node in handed_on], graph))
    return stages


def _exchange(program: fx.GraphModule, shadows: dict[fx.Node, nn.Module]) -> None:
    """Lets calls call something else."""
    for index, (node, shadow) in enumerate(shadows.items()):
        name = f"shadow_{index}"
        program.add_submodule(name, shadow)
        node.target = name if node.op == "call_module" else f"{name}.value"
    if shadows:
        program.recompile()


def owners(traced: Traced) -> list[list[str]]:
    """For each call the names of the modules and tensors of the network that it uses."""
    return [
        [name.removeprefix("network.")]
        if node.op in ("call_module", "get_attr") and (name := str(node.target)).startswith("network.")
        else []  # a tensor that the forward itself has made is nobody's
        for node in traced.calls
    ]


def modules_of(node: fx.Node) -> list[str]:
    """The names of the network's modules in which a call is made, and of what it calls itself."""
    within = [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]
    if node.op in ("call_module", "get_attr"):
        within.append(str(node.target))
    return [path.removeprefix("network.") for path in within if path.startswith("network.")]


def names_of(traced: Traced) -> list[tuple[str, bool]]:
    """For each call what people would call it, and whether that is the name of a module or tensor.

    That is the outermost one that begins with it, such as "encoder.layers.7"; elsewhere the name of the call itself.
    """
    seen: set[str] = set()
    answer = []
    for node in traced.calls:
        new = [name for path in modules_of(node) for name in with_parents(path) if name not in seen]
        seen.update(new)
        answer.append((new[0], True) if new else (node.name, False))
    return answer


def with_parents(name: str) -> list[str]:
    """The name of a module and those of the modules it lies in, the outermost first.

    Example:
        >>> with_parents("encoder.layers.0")
        ['encoder', 'encoder.layers', 'encoder.layers.0']
    """
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def homes_of(traced: Traced, stage_of: Callable[[str], int | None], stages: int) -> list[int]:
    """Where the stages of another trace of the same network end, when it is known where its parts lie.

    A call belongs to the stage of the module it calls, or of the call before it where that lies further on, so that
    values only pass forward.

    Args:
        traced: The forward.
        stage_of: For the name of a module or tensor its stage; None where it lies nowhere in particular.
        stages: The number of stages.
    """
    ends, present, allowed = [0] * stages, 0, may_cut(traced)
    for index, names in enumerate(owners(traced)):
        wanted = max([present, *(stage for stage in map(stage_of, names) if stage is not None)])
        if wanted > present and index and allowed[index - 1]:
            for stage in range(present, wanted):
                ends[stage] = index
            present = wanted
    for stage in range(present, stages):
        ends[stage] = len(traced.calls)
    return ends


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Applies a function to the tensors in tuples, lists and dictionaries."""
    return map_values(lambda one: function(one) if isinstance(one, Tensor) else one, value)


def plain(value: Any) -> Any:
    """The same nested value with torch.fx's own lists and dictionaries exchanged for Python's."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if type(value) is not dict and isinstance(value, dict) and type(value).__module__.startswith("torch.fx"):
        value = dict(value)
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    return tuple(map(plain, value)) if type(value) is tuple else value


def map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to everything in tuples, lists and dictionaries that is none itself."""
    if type(value) in _PLAIN_CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_fields")):
        items = value.values() if isinstance(value, dict) else value
        return rebuild(value, [map_values(function, item) for item in items])
    return function(value)


_PLAIN_CONTAINERS = (tuple, list, dict, OrderedDict)
_PLAIN = (Tensor, numbers.Number, str, slice, range, type(None), type(Ellipsis), enum.Enum)
_OF_TORCH = (torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format)


def check_exchanged(values: Sequence[Any], names: Sequence[str]) -> None:
    """Checks what a stage hands on.

    Args:
        values: What it hands on.
        names: The names of these values in the traced forward.

    Raises:
        StepError: If it is of a kind that nobody could take to another device and gradients back from.
    """
    for value, name in zip(values, names, strict=True):
        map_values(partial(_check_value, name), value)


def _check_value(name: str, value: Any) -> None:
    if not isinstance(value, _PLAIN + _OF_TORCH):
        raise StepError(
            f"A stage of the pipeline hands on {name!r}, in which there is a {type(value).__name__}. Stages exchange"
            " tensors, numbers, and tuples, lists or dictionaries of them: let the network return such where it is cut,"
            " or cut elsewhere with cut_before=[...]."
        )
