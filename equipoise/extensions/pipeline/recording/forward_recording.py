"""One recording of a forward: the call that is recorded, its patches, and its state."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.forward.attribute_reads import attributes_read
from equipoise.extensions.pipeline.forward.layer_lending import computed_on
from equipoise.extensions.pipeline.forward.module_hooks import preserved_hooks
from equipoise.extensions.pipeline.forward.saved_tensors import without_saved_tensors
from equipoise.extensions.pipeline.graph.call_structure import CallStructure
from equipoise.extensions.pipeline.graph.conditions import same_attributes, same_objects
from equipoise.extensions.pipeline.graph.output_structure import OutputStructure
from equipoise.extensions.pipeline.graph.traced import Condition, Traced
from equipoise.extensions.pipeline.recording.recorder import Recorder
from equipoise.extensions.pipeline.recording.targets import encoded
from equipoise.extensions.pipeline.recording.tensor_nodes import Obstacle
from equipoise.interop import call_patches
from equipoise.interop.lightning.classes import module_classes
from equipoise.parallel.snapshot.preserve_state import preserve_state

__all__ = ["Attribute", "ForwardRecording", "NotTraceable", "set_value", "values_of"]

_ENCODER_FORWARD = nn.TransformerEncoder.forward
# A module, and the name of an attribute that it has.
Attribute = tuple[nn.Module, str]
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


class ForwardRecording:
    """One recording of a forward.

    Args:
        network, forward, structure, opaque_types, module, device: See `trace`.

    Attributes:
        attribute_changes: Modules and names of attributes that the last recorded call has set.
    """

    def __init__(
        self,
        network: nn.Module,
        forward: Callable[..., Any],
        structure: CallStructure,
        opaque_types: Mapping[type[nn.Module], str],
        module: nn.Module,
        device: torch.device,
    ) -> None:
        self._network = network
        self._forward = forward
        self._structure = structure
        self._opaque_types = opaque_types
        self._module = module
        self._device = device
        if device.type == "cpu":
            # Tensors on a CPU name it without a number.
            self._device = torch.device("cpu")
        self.attribute_changes: list[Attribute] = []

    def record(self) -> Traced:
        """Run the forward, restore the module's state, and return the calls.

        Raises:
            NotTraceable: If the network's own code cannot be traced.
        """

        def record() -> Traced:
            # Tensors of inference mode do not show that they are changed in place.
            has_gradients = torch.is_grad_enabled()
            outside_of_inference = torch.inference_mode(False)
            same_gradients = torch.set_grad_enabled(has_gradients)
            same_state = preserve_state(self._module, containers=True)
            with outside_of_inference, same_gradients, same_state, preserved_hooks(self._module):
                return self._record()

        return without_saved_tensors(record)

    def make_first_call(self) -> None:
        """Run the forward, and restore the module's state but the attributes that it sets."""

        def call() -> dict[Attribute, Any]:
            with preserve_state(self._module, containers=True):
                args, kwargs = self._structure.fill(self._structure.copies_on(self._device))
                silent = call_patches.patched_logging(module_classes(), _ignore)
                with computed_on(self._device, self._network, self._module), silent:
                    self._forward(*args, **kwargs)
                return values_of(self.attribute_changes)

        values = without_saved_tensors(call)
        for attribute, value in values.items():
            set_value(attribute, value)

    def _record(self) -> Traced:
        # 1. One call for each tensor of the arguments.
        root = nn.ModuleDict({"network": self._network})
        graph = fx.Graph()
        placeholder = graph.placeholder("tensors")
        tensors = self._structure.copies_on(self._device)
        inputs: list[tuple[Tensor, fx.Node]] = []
        for index, tensor in enumerate(tensors):
            node = graph.call_function(operator.getitem, (placeholder, index))
            inputs.append((tensor, node))
        recorder = Recorder(
            graph,
            root,
            inputs,
            self._device,
            self._opaque_types,
        )

        # 2. Run the forward.
        forward = self._forward
        function = getattr(forward, "__func__", None)
        # A subclass may have a forward of its own.
        if isinstance(self._network, nn.TransformerEncoder) and function is _ENCODER_FORWARD:
            forward = partial(encoded, self._network)
        args, kwargs = self._structure.fill(tensors)
        with self._watched_by(recorder):
            output = forward(*args, **kwargs)
            with recorder.paused():
                return self._finished(recorder, root, graph, output)

    def _finished(self, recorder: Recorder, root: nn.Module, graph: fx.Graph, output: Any) -> Traced:
        """Return the calls, if they are the forward.

        Raises:
            NotTraceable: If the calls are not the forward.
        """
        # 1. Refuse what cannot be followed.
        self.attribute_changes = recorder.effects.attribute_changes()
        kind = type(self._network).__name__
        obstacle = recorder.obstacle
        change = recorder.effects.describe(self._network)
        if not obstacle and change:
            obstacle = f"{kind}.forward {change}"
        if obstacle:
            raise NotTraceable(obstacle)

        # 2. Return the output.
        output_structure, output_tensors = OutputStructure.of(output)
        try:
            values = [recorder.arguments.of(tensor) for tensor in output_tensors]
        except Obstacle as error:
            raise NotTraceable(f"{kind}.forward {error}") from error
        graph.output(tuple(values))

        # 3. Note under which conditions the calls serve for other tensors.
        conditions = recorder.questions.conditions()
        conditions += _conditions_of_modules(recorder.followed, root, graph)
        traced = Traced(
            root,
            graph,
            recorder.opaque,
            output_structure,
            conditions,
        )
        traced.changes.update(recorder.calls.changes)
        return traced

    @contextmanager
    def _watched_by(self, recorder: Recorder) -> Iterator[None]:
        """Report everything that the forward calls to a recorder within the context."""
        patches = (
            call_patches.patched_module_calls(self._network, recorder.on_module_call),
            call_patches.patched_autograd_functions(recorder.on_function_call),
            call_patches.patched_saved_tensor_hooks(recorder.on_saved_tensor_hooks),
            call_patches.patched_logging(module_classes(), recorder.on_log),
            call_patches.patched_progress(module_classes(), recorder.on_progress),
        )
        with ExitStack() as stack:
            computation = computed_on(self._device, self._network, self._module, recorder.on_operation)
            stack.enter_context(computation)
            for patch in patches:
                stack.enter_context(patch)
            stack.enter_context(recorder)
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
    for node in graph.nodes:
        path = str(node.target)
        if node.op == "get_attr" and path.startswith("network."):
            paths.append(path)
    if paths:
        conditions.append(same_objects(root, paths))
    return conditions


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing for a value that is logged."""


def values_of(attributes: Iterable[Attribute]) -> dict[Attribute, Any]:
    """Return the values of attributes of modules; `_MISSING` for those that do not exist."""
    values: dict[Attribute, Any] = {}
    for owner, name in attributes:
        value = vars(owner).get(name, _MISSING)
        values[(owner, name)] = value
    return values


def set_value(attribute: Attribute, value: Any) -> None:
    """Set an attribute of a module, or remove it if the value is `_MISSING`."""
    owner, name = attribute
    if value is _MISSING:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value
