"""Cut a traced forward into stages, each a module that shares the network's layers.

A stage passes on a list of values: those of this stage and of earlier ones that a later stage, or the end, needs. Skip
connections and tuples therefore pass through the stages between.
"""

import enum
import linecache
import numbers
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.errors import StepError
from equipoise.extensions.pipeline.graph.call_names import owner_of
from equipoise.extensions.pipeline.graph.output_structure import OutputStructure
from equipoise.extensions.pipeline.graph.traced import FOLLOWS, STAYS, Traced, copy_call
from equipoise.tree import leaves_of, map_leaves, tensors_in

__all__ = [
    "StageProgram",
    "check_exchanged",
    "crossing",
    "ends_by_placement",
    "make_stages",
    "map_tensors",
    "map_values",
    "may_cut",
    "plain_items",
    "taking_inputs",
    "tensors_of",
    "with_user_lines",
]

# For a stage and a call the module that replaces the network's own there; None: the network's own.
Replacement = Callable[[int, fx.Node], nn.Module | None]


@dataclass(frozen=True, eq=False)
class StageProgram:
    """The calls of one stage.

    Attributes:
        run: Takes the stage's inputs and returns its outputs.
        outputs: Names of the values that it passes on. Empty for the last stage, which returns the network's output.
        graph: Its calls. Default: an empty graph, for a stage that was not traced here.
    """

    run: Callable[..., Any]
    outputs: tuple[str, ...]
    graph: fx.Graph = field(default_factory=fx.Graph)


# Places for a cut.


def crossing(traced: Traced, ends: Sequence[int]) -> list[list[fx.Node]]:
    """Return for each cut the values that cross it, in the order of their calls.

    Args:
        traced: The forward.
        ends: For each stage but the last the index of the call after its last.
    """
    # 1. Find the last use of each value. The placeholder comes before the first call, the output after the last one.
    nodes = list(traced.graph.nodes)
    order = {node: index for index, node in enumerate(nodes, start=-1)}
    last_use: dict[fx.Node, int] = {}
    for node in nodes:
        last_use[node] = max((order[user] for user in node.users), default=-1)

    # 2. A value crosses a cut that lies between its call and its last use.
    crossings = []
    for end in ends:
        crossings.append([node for node in nodes if order[node] < end <= last_use[node]])
    return crossings


def may_cut(traced: Traced) -> list[bool]:
    """Return for each call True if a stage may end with it.

    Values that a stage receives are leaves of autograd, which nothing may change in place. So a call that changes its
    argument in place must be in the same stage as that argument, and as the value of which it may be a view.
    """
    calls = traced.calls
    cuts = crossing(traced, range(1, len(calls) + 1))
    first_end = taking_inputs(traced)

    # 1. Find the values that change in place, and the index of the call that changes them.
    last_change: dict[fx.Node, int] = {}
    for index, node in enumerate(calls):
        for value in traced.changes.get(node, ()):
            last_change[value] = index

    # 2. Forbid cuts that such a value crosses before it changes.
    allowed = []
    for index in range(len(calls)):
        is_allowed = index >= first_end
        for node in cuts[index]:
            changes_later = last_change.get(node, -1) > index
            if changes_later or node.meta.get(STAYS) or _is_of_no_stage(node, traced):
                is_allowed = False
        # The last call has no next one.
        next_calls = calls[index + 1 : index + 2]
        if any(node.meta.get(FOLLOWS) for node in next_calls):
            is_allowed = False
        allowed.append(is_allowed)
    return allowed


def _is_of_no_stage(node: fx.Node, traced: Traced) -> bool:
    """Return True for the look-up of an object from outside that stages do not exchange, such as a configuration."""
    if node.op != "get_attr":
        return False
    found = vars(traced.root).get(str(node.target), ())
    return not all(map(_is_exchanged, leaves_of(found, plain_items)))


def taking_inputs(traced: Traced) -> int:
    """Return the number of calls at the beginning that only unpack the network's arguments."""
    placeholder = traced.only_node("placeholder")
    for index, node in enumerate(traced.calls):
        if node.all_input_nodes[:1] != [placeholder]:
            return index
    return len(traced.calls)


# Stages.


def make_stages(
    traced: Traced,
    ends: Sequence[int],
    replacement_of: Replacement | None = None,
    devices: Sequence[torch.device] | None = None,
) -> list[StageProgram]:
    """Cut a forward into stages.

    Args:
        traced: The forward.
        ends: For each stage the index of the call after its last.
        replacement_of: For a stage and a call the module that replaces the network's own; None: the network's own. The
            replacement of a parameter or buffer has it as its attribute `value`. Default: nothing is replaced.
        devices: The device of each stage. Default: the CPU for all.
    """
    passing = crossing(traced, ends[:-1])
    inputs = [[traced.only_node("placeholder")], *passing]
    begins = [0, *ends[:-1]]
    # The last stage returns the network's output.
    outputs = [*passing, None]
    calls = traced.calls
    if devices is None:
        devices = [torch.device("cpu")] * len(ends)
    stages = []
    for stage, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        program = _make_stage(
            traced,
            stage,
            devices[stage],
            inputs[stage],
            calls[begin:end],
            outputs[stage],
            replacement_of,
        )
        stages.append(program)
    return stages


def _make_stage(
    traced: Traced,
    stage: int,
    device: torch.device,
    inputs: Sequence[fx.Node],
    calls: Sequence[fx.Node],
    outputs: Sequence[fx.Node] | None,
    replacement_of: Replacement | None,
) -> StageProgram:
    """Return one stage. If `outputs` is None, it is the last one, which returns the network's output."""
    # 1. Copy the calls into a graph of their own.
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    replacements: dict[fx.Node, nn.Module] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
    for node in calls:
        copy = copy_call(graph, node, copies, device)
        copies[node] = copy
        replacement = None
        if replacement_of is not None:
            replacement = replacement_of(stage, node)
        if replacement is not None:
            replacements[copy] = replacement

    # 2. Return the values that pass on, or the network's output.
    if outputs is None:
        graph.output(fx.map_arg(traced.only_node("output").args[0], copies.__getitem__))
    else:
        graph.output([copies[node] for node in outputs])

    # 3. Compile a module that shares the network's layers.
    program = fx.GraphModule(traced.root, graph)
    program.training = traced.root.training
    _replace_targets(program, replacements)
    run = with_user_lines(program)
    if outputs is None:
        return StageProgram(partial(_run_last, run, traced.output), (), graph)
    return StageProgram(run, tuple(node.name for node in outputs), graph)


def with_user_lines(program: fx.GraphModule) -> Callable[..., Any]:
    """Return the forward of compiled calls, whose errors have a note with the user's line that makes the call."""
    lines = {node.name: node.meta["line"] for node in program.graph.nodes if node.meta.get("line")}
    return partial(_run_with_lines, program.forward, lines)


def _run_with_lines(run: Callable[..., Any], lines: Mapping[str, str], *inputs: Any) -> Any:
    try:
        return run(*inputs)
    except Exception as error:
        # The frame of the compiled calls is the next one. Each of its lines assigns the value of one call.
        frame = error.__traceback__ and error.__traceback__.tb_next
        if frame:
            source = linecache.getline(frame.tb_frame.f_code.co_filename, frame.tb_lineno)
            line = lines.get(source.partition("=")[0].strip())
            if line:
                error.add_note(f"The call is that of {line}.")
        raise


def _run_last(run: Callable[..., Any], output: OutputStructure, *inputs: Any) -> Any:
    return output.fill(run(*inputs))


def _replace_targets(program: fx.GraphModule, replacements: dict[fx.Node, nn.Module]) -> None:
    """Let calls use other modules than the network's."""
    for index, (node, replacement) in enumerate(replacements.items()):
        name = f"replacement_{index}"
        program.add_submodule(name, replacement)
        target = name
        if node.op == "get_attr":
            # A parameter or buffer is an attribute of its replacement.
            target = f"{name}.value"
        node.target = target
    if replacements:
        program.recompile()


def ends_by_placement(traced: Traced, stage_of: Callable[[str], int | None], stages: int) -> list[int]:
    """Return the ends of stages for another trace of a network whose layers are placed already.

    A call belongs to the stage of the module that it calls. If the call before it belongs to a later stage, so does
    this one: values pass only forward.

    Args:
        traced: The forward.
        stage_of: For the name of a module or tensor its stage; None if it belongs to no stage in particular.
        stages: Number of stages.

    Returns:
        For each stage the index of the call after its last.
    """
    ends = [0] * stages
    current = 0
    allowed = may_cut(traced)
    for index, node in enumerate(traced.calls):
        name = owner_of(node)
        stage = None if name is None else stage_of(name)
        target = current if stage is None else max(current, stage)
        may_begin = index > 0 and allowed[index - 1]
        if target > current and may_begin:
            for ended in range(current, target):
                ends[ended] = index
            current = target
    for ended in range(current, stages):
        ends[ended] = len(traced.calls)
    return ends


# Values that pass between stages.


def plain_items(value: Any) -> Iterable[Any] | None:
    """Return the items of a tuple, named tuple, list or dictionary, but not of their other subclasses.

    The rule for values between stages, see `equipoise.tree`.
    """
    if type(value) in (tuple, list):
        return value  # type: ignore[no-any-return]
    if type(value) in (dict, OrderedDict):
        return value.values()  # type: ignore[no-any-return]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value
    return None


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists and dictionaries, in order."""
    return list(tensors_in(value, plain_items))


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to the tensors in tuples, lists and dictionaries."""

    def function_of_tensor(item: Any) -> Any:
        if isinstance(item, Tensor):
            return function(item)
        return item

    return map_values(function_of_tensor, value)


def map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to everything in tuples, lists and dictionaries that is not one of these itself."""
    return map_leaves(function, value, plain_items)


_PLAIN = (Tensor, numbers.Number, str, slice, range, type(None), type(Ellipsis), enum.Enum)
_OF_TORCH = (torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format)


def check_exchanged(values: Sequence[Any], names: Sequence[str]) -> None:
    """Check that the values which a stage passes on can move to another device, and their gradients back.

    Args:
        values: The values.
        names: Their names in the traced forward.

    Raises:
        StepError: If a value is of an unsupported type.
    """
    for value, name in zip(values, names, strict=True):
        map_values(partial(_check_value, name), value)


def _is_exchanged(value: Any) -> bool:
    return isinstance(value, _PLAIN + _OF_TORCH)


def _check_value(name: str, value: Any) -> None:
    if not _is_exchanged(value):
        raise StepError(
            f"A stage of the pipeline hands on {name!r}, in which there is a {type(value).__name__}. Stages exchange"
            " tensors, numbers, and tuples, lists or dictionaries of them: let the network return such where it is cut,"
            " or cut elsewhere with cut_before=[...]."
        )
