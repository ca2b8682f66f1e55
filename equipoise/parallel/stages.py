"""A traced forward cut into stages, each a module of its own that shares the network's layers.

What a stage hands on is a list of values: what it or an earlier stage made and a later one, or the end, needs. Skip
connections and tuples so pass through the stages between.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from equipoise.parallel.tracing import Traced, writes_in_place

__all__ = ["StageProgram", "crossing", "homes_of", "make_stages", "map_tensors", "may_cut", "owners"]


class StageProgram:
    """The calls of one stage.

    Attributes:
        run: Takes the stage's inputs and returns what it hands on.
        inputs: The names of the values it takes.
        outputs: The names of the values it hands on; of the last stage, none: it returns the network's output.
        graph: Its calls.
    """

    def __init__(self, run: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str], graph: fx.Graph) -> None:
        self.run, self.inputs, self.outputs, self.graph = run, tuple(inputs), tuple(outputs), graph


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
    make in the stage of its argument.
    """
    calls = traced.calls
    cuts = crossing(traced, range(1, len(calls) + 1))
    order = {node: index for index, node in enumerate(calls)}
    changed: list[tuple[fx.Node, int]] = []
    for node in calls:
        if writes_in_place(node, traced.root):
            changed += [(argument, order[node]) for argument in node.all_input_nodes]
    answer = []
    for index in range(len(calls)):
        passing = set(cuts[index])
        answer.append(not any(argument in passing and at > index for argument, at in changed))
    return answer


def make_stages(traced: Traced, ends: Sequence[int]) -> list[StageProgram]:
    """Cuts a forward.

    Args:
        traced: The forward.
        ends: For each stage the index of the call after its last.
    """
    passing = crossing(traced, ends[:-1])
    (given,) = (node for node in traced.graph.nodes if node.op == "placeholder")
    inputs: list[list[fx.Node]] = [[given], *passing]
    calls, stages = traced.calls, []
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    for stage, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        graph, copies = fx.Graph(), {}
        for node in inputs[stage]:
            copies[node] = graph.placeholder(node.name)
        for node in calls[first:end]:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        last = stage == len(ends) - 1
        handed_on = [] if last else passing[stage]
        made = fx.map_arg(output.args[0], copies.__getitem__) if last else [copies[node] for node in handed_on]
        graph.output(made)
        program = fx.GraphModule(traced.root, graph)
        program.training = traced.root.training
        names = [node.name for node in inputs[stage]]
        stages.append(StageProgram(program.forward, names, [node.name for node in handed_on], graph))
    return stages


def owners(traced: Traced) -> list[list[str]]:
    """For each call the names of the modules and tensors of the network that it uses."""
    return [
        [str(node.target).removeprefix("network.")] if node.op in ("call_module", "get_attr") else []
        for node in traced.calls
    ]


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
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value
