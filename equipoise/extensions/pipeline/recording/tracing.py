"""Trace the forward of a network into a list of calls, by recording it while it runs.

Some submodules cannot be followed: their code asks for values that the network computes, or it changes attributes. Such
a submodule stays whole: its own call is one entry of the list. What remains are obstacles in the network's own forward,
which become errors.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.forward import call_patches
from equipoise.extensions.pipeline.forward.attribute_reads import attributes_read
from equipoise.extensions.pipeline.forward.forward_effects import SETS_ATTRIBUTE
from equipoise.extensions.pipeline.forward.layer_lending import computed_on
from equipoise.extensions.pipeline.graph.call_structure import NetworkCall
from equipoise.extensions.pipeline.graph.conditions import same_attributes, same_objects
from equipoise.extensions.pipeline.graph.output_structure import OutputStructure
from equipoise.extensions.pipeline.graph.traced import Condition, Traced
from equipoise.extensions.pipeline.recording.recorder import Recorder
from equipoise.extensions.pipeline.recording.targets import encoded
from equipoise.extensions.pipeline.recording.tensor_nodes import Obstacle
from equipoise.interop.lightning.classes import module_classes

__all__ = ["NotTraceable", "trace"]

_ENCODER_FORWARD = nn.TransformerEncoder.forward
# A module, and the name of an attribute that it has.
_Attribute = tuple[nn.Module, str]
# The value of an attribute that does not exist.
_MISSING = object()


class NotTraceable(Exception):
    """Raised for a network whose forward cannot be traced.

    Attributes:
        obstacle: The first obstacle, with its line.
    """

    def __init__(self, obstacle: str) -> None:
        super().__init__(obstacle)
        self.obstacle = obstacle


class _Recording(NamedTuple):
    """One recording of a forward.

    Attributes:
        traced: The calls; None if they are not the forward.
        obstacle: The reason why they are not, in the network's own code; empty if there is none.
        obstacles: The reason in each submodule.
        attributes: Modules and names of attributes that the forward has set.
    """

    traced: Traced | None
    obstacle: str
    obstacles: Mapping[str, str]
    attributes: list[_Attribute]

    @property
    def sets_attributes(self) -> bool:
        """True if an attribute that the forward sets is an obstacle."""
        return any(SETS_ATTRIBUTE in reason for reason in [self.obstacle, *self.obstacles.values()])


def trace(call: NetworkCall, opaque_types: Mapping[type[nn.Module], str] | None = None) -> Traced:
    """Trace a forward. It runs once, or several times if it sets attributes or submodules turn out to stay whole.

    Its state is restored.

    Args:
        call: The call.
        opaque_types: Classes of submodules that stay whole, each with the reason, beside those that cannot be traced.
            Default: none.

    Raises:
        NotTraceable: If the network's own code cannot be traced.
    """
    opaque_types = opaque_types or {}
    reasons: dict[str, str] = {}
    for name, submodule in call.network.named_modules():
        kind = type(submodule)
        if kind in opaque_types:
            reasons[name] = opaque_types[kind]

    # 1. Some libraries set attributes at the first call alone. That call is made now, and the second one is recorded.
    recording = _record(call, reasons)
    if recording.sets_attributes:
        originals = _values_of(recording.attributes)
        _make_first_call(call, recording.attributes)
        recording = _record(call, reasons)
        # Attributes that every call sets keep the values that they had.
        for attribute, value in originals.items():
            if attribute in recording.attributes:
                _set_value(attribute, value)

    # 2. What was found to stay whole is one call in the next recording.
    while recording.obstacles:
        reasons |= recording.obstacles
        recording = _record(call, reasons)
    if recording.traced is None:
        raise NotTraceable(recording.obstacle)
    return recording.traced


def _record(call: NetworkCall, reasons: Mapping[str, str]) -> _Recording:
    """Run a forward, and return its calls."""
    # Tensors of inference mode do not show that they are changed in place.
    has_gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(has_gradients):
        return call.rehearsed(partial(_recorded, call, reasons))


def _make_first_call(call: NetworkCall, attributes: list[_Attribute]) -> None:
    """Run a forward, and restore the module's state but these attributes."""

    def compute() -> dict[_Attribute, Any]:
        call.compute()
        return _values_of(attributes)

    values = call.rehearsed(compute, keeps_hooks=True)
    for attribute, value in values.items():
        _set_value(attribute, value)


def _recorded(call: NetworkCall, reasons: Mapping[str, str]) -> _Recording:
    # 1. One call for each tensor of the arguments.
    root = nn.ModuleDict({"network": call.network})
    graph = fx.Graph()
    placeholder = graph.placeholder("tensors")
    tensors = call.copied_tensors()
    inputs: list[tuple[Tensor, fx.Node]] = []
    for index, tensor in enumerate(tensors):
        inputs.append((tensor, graph.call_function(operator.getitem, (placeholder, index))))
    device = call.device
    if device.type == "cpu":
        # Tensors on a CPU name it without a number.
        device = torch.device("cpu")
    recorder = Recorder(graph, root, inputs, device, reasons)

    # 2. Run the forward.
    forward = call.forward
    function = getattr(forward, "__func__", None)
    # A subclass may have a forward of its own.
    if isinstance(call.network, nn.TransformerEncoder) and function is _ENCODER_FORWARD:
        forward = partial(encoded, call.network)
    args, kwargs = call.structure.fill(tensors)
    with _watched_by(recorder, call):
        output = forward(*args, **kwargs)
        with recorder.paused():
            return _finished(recorder, root, graph, output)


def _finished(recorder: Recorder, root: nn.Module, graph: fx.Graph, output: Any) -> _Recording:
    """Return the calls, if they are the forward."""
    # 1. Refuse what cannot be followed. Obstacles within the forward begin with their line.
    attributes = recorder.effects.attribute_changes()
    obstacle = recorder.obstacle
    network = root.get_submodule("network")
    prefix = f"{type(network).__name__}.forward"
    change = recorder.effects.describe(network)
    if change and not obstacle:
        obstacle = f"{prefix} {change}"
    if obstacle or recorder.obstacles:
        return _Recording(None, obstacle, recorder.obstacles, attributes)

    # 2. Return the output.
    output_structure, tensors = OutputStructure.of(output)
    try:
        graph.output(tuple(map(recorder.arguments.convert, tensors)))
    except Obstacle as error:
        return _Recording(None, f"{prefix} {error}", {}, attributes)

    # 3. Note under which conditions the calls serve for other tensors.
    conditions = recorder.questions.conditions()
    conditions += _conditions_of_modules(recorder.followed, root, graph)
    traced = Traced(
        root,
        graph,
        recorder.opaque,
        output_structure,
        conditions,
        recorder.calls.changes,
    )
    return _Recording(traced, "", {}, attributes)


@contextmanager
def _watched_by(recorder: Recorder, call: NetworkCall) -> Iterator[None]:
    """Report everything that the forward calls to a recorder within the context."""

    def on_saved_tensor_hooks() -> None:
        recorder.on_effect("activation checkpointing, or another hook on saved tensors, cannot be followed")

    def on_log(*args: Any, **kwargs: Any) -> None:
        recorder.on_effect("logs a value, which only the step itself may do")

    def on_progress(name: str) -> None:
        recorder.on_effect(f"reads `{name}`, which changes in the run")

    contexts = (
        computed_on(call.device, call.network, call.module, recorder.on_operation),
        call_patches.patched_module_calls(call.network, recorder.on_module_call),
        call_patches.patched_autograd_functions(recorder.on_function_call),
        call_patches.patched_saved_tensor_hooks(on_saved_tensor_hooks),
        call_patches.patched_logging(module_classes(), on_log),
        call_patches.patched_progress(module_classes(), on_progress),
        recorder,
    )
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _conditions_of_modules(followed: Iterable[nn.Module], root: nn.Module, graph: fx.Graph) -> list[Condition]:
    """Return the conditions about attributes of modules."""
    # 1. Numbers, texts and truth values, by which a forward may decide.
    conditions: list[Condition] = []
    for submodule in followed:
        attributes = attributes_read(submodule)
        if attributes:
            conditions.append(same_attributes(submodule, attributes))

    # 2. Tensors. Constants of the recording are attributes of the root alone, and stay the same.
    paths = []
    for node in graph.find_nodes(op="get_attr"):
        path = str(node.target)
        if path.startswith("network."):
            paths.append(path)
    if paths:
        conditions.append(same_objects(root, paths))
    return conditions


def _values_of(attributes: Iterable[_Attribute]) -> dict[_Attribute, Any]:
    """Return the values of attributes of modules; `_MISSING` for those that do not exist."""
    values = {}
    for owner, name in attributes:
        values[owner, name] = vars(owner).get(name, _MISSING)
    return values


def _set_value(attribute: _Attribute, value: Any) -> None:
    """Set an attribute of a module, or remove it if the value is `_MISSING`."""
    owner, name = attribute
    if value is _MISSING:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value
