"""Record the calls of a forward while it runs.

The forward runs as it is, with real tensors: whatever it asks about them is answered truly. Calls of torch's functions
pass a mode of torch; calls of modules, of autograd functions and of checkpointing are patched. If the calls of a
submodule alone would not be its forward, the forward is recorded once more, with this submodule as one call.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.replaced_forwards import has_replaced_forward
from equipoise.extensions.pipeline.forward.forward_effects import ForwardEffects
from equipoise.extensions.pipeline.forward.operation_traits import Traits, traits_of
from equipoise.extensions.pipeline.forward.packed_sequences import padded_call
from equipoise.extensions.pipeline.forward.saved_tensors import REENTRANT_CHECKPOINTING
from equipoise.extensions.pipeline.forward.user_lines import line_of_user
from equipoise.extensions.pipeline.graph.output_structure import structure_of
from equipoise.extensions.pipeline.graph.traced import FOLLOWS
from equipoise.extensions.pipeline.recording.arguments import Arguments
from equipoise.extensions.pipeline.recording.questions import Question, Questions
from equipoise.extensions.pipeline.recording.recorded_calls import Computed, Place, RecordedCalls
from equipoise.extensions.pipeline.recording.targets import (
    applied,
    assigned,
    call_of,
    check_structure,
    encoded,
    name_of,
    present_modes,
    under_modes,
)
from equipoise.extensions.pipeline.recording.tensor_nodes import Facts, Obstacle, TensorNodes
from equipoise.interop.torch.modules import has_module_hooks, versions
from equipoise.parallel.activation_checkpointing import is_checkpointed
from equipoise.tree import items_of, leaves_of, tensors_in

__all__ = ["Recorder"]

# Torch's modules that are followed, since they call layers of the user's.
_FOLLOWED: tuple[type[nn.Module], ...] = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)
# The same, in training alone: in an evaluation they are one function of torch's own.
_FOLLOWED_IN_TRAINING = (nn.TransformerEncoderLayer,)
# Functions that run backward, and the attribute that holds what a backward has left.
_BACKWARDS = {"backward", "grad"}
# Functions that divide a tensor at the numbers in another one.
_SPLITS = {"dsplit", "hsplit", "tensor_split", "vsplit"}
# Changes in place that give a tensor the sizes of another one.
_RESIZES = {"resize_as_", "resize_as_sparse_", "set_"}
# Functions that return as many tensors as follows from sizes.
_LISTS = _SPLITS | {"chunk", "split", "split_with_sizes", "unbind", "unsafe_chunk", "unsafe_split"}
_LISTS |= {"unsafe_split_with_sizes"}
# What an opaque submodule may return beside tensors; it is taken for a constant.
_CONSTANTS = (str, torch.dtype, torch.device, type(None))
_OTHER_MODES = "computed under torch.no_grad, torch.autocast or their like, which cannot be followed"

# The class has no types.
_Base: Any = TorchFunctionMode


class _ModuleCall(NamedTuple):
    """A call of a submodule."""

    original: Callable[..., Any]
    module: nn.Module
    path: str
    args: Any
    kwargs: Any

    def run(self) -> Any:
        """Run the forward, and return its result."""
        return self.original(self.module, *self.args, **self.kwargs)

    @property
    def name(self) -> str:
        """Name of the submodule in the network."""
        return self.path.removeprefix("network.")

    @property
    def class_name(self) -> str:
        """Name of the submodule's class."""
        return type(self.module).__name__


@dataclass
class _RunningModule:
    """A module whose forward is running.

    Attributes:
        module: The module.
        path: Its path in the root.
        traits: Traits of the operations that it has run.
        obstacle: Reason why its calls alone would not be its forward; empty if there is none.
    """

    module: nn.Module
    path: str
    traits: Traits = field(default_factory=lambda: Traits(0))
    obstacle: str = ""


class Recorder(_Base):  # type: ignore[misc]
    """Record the calls of a network's forward, within a context.

    Args:
        graph: Receives the calls.
        root: Root of the graph; its attribute `network` is the network.
        inputs: The network's tensors, and the calls that take them from its arguments.
        device: Device of these tensors. A call that names it names the device of its stage instead.
        reasons: For each submodule that stays whole the reason.

    Attributes:
        opaque: Those of them that were called, each with the reason.
        obstacles: For each submodule that was found not to be its calls alone the reason. The recording must then be
            repeated with this submodule whole.
        followed: The modules whose calls were recorded.
        arguments: Turns arguments into those of calls in the graph.
        questions: Questions that the forward has asked about its tensors.
        effects: Side effects of the forward.
        calls: The recorded calls.
    """

    def __init__(
        self,
        graph: fx.Graph,
        root: nn.Module,
        inputs: Sequence[tuple[Tensor, fx.Node]],
        device: torch.device,
        reasons: Mapping[str, str],
    ) -> None:
        super().__init__()
        # 1. The network, as it is before its forward.
        network = root.get_submodule("network")
        self.opaque: dict[str, str] = {}
        self.obstacles: dict[str, str] = {}
        self.followed: list[nn.Module] = [network]
        self.effects = ForwardEffects(network)
        self._graph = graph
        self._reasons = reasons
        self._modes = present_modes()
        # Hooks must run at each call. Some are registered later, for the recording alone.
        self._hooked_ids = set(map(id, filter(has_module_hooks, network.modules())))
        # The first path of each module.
        self._paths = {id(module): path for path, module in root.named_modules()}

        # 2. The calls so far, which take the network's tensors from its arguments.
        self._tensors = TensorNodes(graph, root)
        tensors = [tensor for tensor, _ in inputs]
        for index, (tensor, node) in enumerate(inputs):
            self._tensors.add(tensor, node)
            self._tensors.facts[node] = Facts(frozenset([index]), is_pure=True)
            self._tensors.note_operation(tensor, ())
        self.arguments = Arguments(graph, self._tensors, device)
        self.questions = Questions(graph, root, self._tensors, self.arguments, tensors)
        self.calls = RecordedCalls(graph, self._tensors, device)

        # 3. The modules whose forward is running, the outermost first. Other threads may call modules meanwhile.
        self._running = [_RunningModule(network, "network")]
        self._thread = threading.get_ident()
        self._is_paused = False
        # Traits of the operations of the present call.
        self._traits = Traits(0)

    @property
    def obstacle(self) -> str:
        """Reason why the network's calls alone would not be its forward; empty if there is none."""
        return self._running[0].obstacle

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let calls pass within the context, unrecorded."""
        was_paused = self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = was_paused

    @property
    def _is_off(self) -> bool:
        """True if calls are not recorded: within calls, after an obstacle, and in other threads."""
        has_obstacle = bool(self._running[-1].obstacle)
        return self._is_paused or has_obstacle or threading.get_ident() != self._thread

    @contextmanager
    def _obstacles_noted(self) -> Iterator[None]:
        """Let calls pass within the context, and note an obstacle or another error that is raised there."""
        with self.paused():
            try:
                yield
            except Obstacle as obstacle:
                self._note_obstacle(str(obstacle))
                # From Python 3.12 on, the traceback and the frame of `with` keep each other, and tensors of the step.
                obstacle.with_traceback(None)
            except Exception as error:
                # The user's code may catch it, and continue in another way than in the next call.
                self._note_obstacle(f"raises {type(error).__name__}")
                raise

    def _note_obstacle(self, reason: str) -> None:
        """Note that the calls of the innermost module would not be its forward. The first reason counts."""
        line = line_of_user(inspect.currentframe())
        if line:
            reason = f"{line} ({reason})"
        running = self._running[-1]
        if not running.obstacle:
            running.obstacle = reason

    def _place(self) -> Place:
        """Return the running modules without the network."""
        place = {}
        for running in self._running[1:]:
            place[running.path] = (running.path, type(running.module))
        return place

    # Notices.

    def on_effect(self, reason: str) -> None:
        """Note that the forward does something that its calls would not do.

        Args:
            reason: The effect, as a predicate.
        """
        if not self._is_off:
            self._note_obstacle(reason)

    def on_operation(self, name: str, result: Any, args: Any) -> None:
        """Note an operation of torch, below its functions.

        Args:
            name: Its name, such as "addmm".
            result: Its result.
            args: Its positional arguments.
        """
        traits = traits_of(name, args)
        self._traits |= traits
        for running in self._running:
            running.traits |= traits
        self._tensors.note_operation(result, args)

    # Functions.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_off:
            return func(*args, **kwargs)
        with self._obstacles_noted():
            # Calls within the function are no calls of the forward.
            computed = self._compute(partial(func, *args, **kwargs), (args, kwargs))
            self._record_function(func, args, kwargs, computed)
        return computed.result

    def _compute(self, run: Callable[[], Any], arguments: Any) -> Computed:
        tensors = list(tensors_in(arguments))
        # One by one: tensors of inference mode have no version, and do not change outside of it.
        before = [versions([tensor]) for tensor in tensors]
        self._traits = Traits(0)
        result = run()
        changed = []
        for tensor, version in zip(tensors, before, strict=True):
            if versions([tensor]) != version:
                changed.append(tensor)
        return Computed(result, tensors, changed, self._traits)

    def _record_function(self, function: Any, args: Any, kwargs: Any, computed: Computed) -> None:
        # 1. A function without tensors in its result asks a question.
        name = name_of(function)
        if name in _BACKWARDS:
            raise Obstacle("runs backward by itself")
        results = list(tensors_in(computed.result))
        if not results and not computed.changed:
            # No variable holds the frame: it would keep itself alive, and with it the tensors of the call.
            question = Question(function, name, args, kwargs, computed.result)
            self.questions.note(question, inspect.currentframe())
            return

        # 2. A function that only returns its argument is no call.
        is_in_place = name.endswith("_") and not name.endswith("__")
        returns_arguments = set(map(id, computed.arguments)).issuperset(map(id, results))
        if returns_arguments and not computed.changed and not is_in_place:
            return

        # 3. Some functions need another call than their own.
        target, args = call_of(function, args)
        if name == "_pad_packed_sequence":
            target, args = padded_call(args, inspect.currentframe())
        if name == "__setitem__":
            target = assigned
            computed = computed._replace(result=args[0])
        modes = present_modes()
        if modes != self._modes:
            target = under_modes(target, modes)

        # 4. Record the call.
        graph_args, graph_kwargs = self.arguments.convert_call(args, kwargs)
        node = self._graph.call_function(target, graph_args, graph_kwargs)
        if name in _SPLITS and len(computed.arguments) > 1:
            # Torch computes these by slices, whose bounds are values of the second tensor.
            computed = computed._replace(traits=computed.traits | Traits.DYNAMIC)
        computed = computed._replace(is_pure=not is_in_place)
        changes_values = is_in_place or name == "__setitem__"
        if changes_values and returns_arguments and name not in _RESIZES:
            computed = computed._replace(keeps_sizes=True)
        self.calls.finish(node, computed, self._place())

        # 5. The number of tensors in a list is a size, for which the forward need not ask.
        if name in _LISTS:
            self.questions.note_length(computed.arguments, results)

    def on_function_call(self, original: Callable[..., Any], kind: Any, args: Any, kwargs: Any) -> Any:
        """Record the call of an autograd function.

        Args:
            original: Its `apply`.
            kind: Its class.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Raises:
            ConfigurationError: If it is activation checkpointing that no pipeline can train with.
        """
        if self._is_off:
            return original(kind, *args, **kwargs)
        with self._obstacles_noted():
            # 1. The call.
            computed = self._compute(partial(original, kind, *args, **kwargs), (args, kwargs))
            has_gradients = any(tensor.requires_grad for tensor in tensors_in(computed.result))
            if kind is CheckpointFunction and has_gradients:
                raise ConfigurationError(REENTRANT_CHECKPOINTING)

            # 2. Its record.
            _check_function_arguments(args)
            self._check_modes()
            graph_args, graph_kwargs = self.arguments.convert_call(args, kwargs)
            node = self._graph.call_function(applied(kind), graph_args, graph_kwargs)
            _check_result(kind.__name__, computed.result)
            self.calls.finish(node, computed, self._place())
        return computed.result

    def _check_modes(self) -> None:
        """Check that torch is in the same modes as around the forward. The recorded call would not have others."""
        if present_modes() != self._modes:
            raise Obstacle(_OTHER_MODES)

    # Modules.

    def on_module_call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record the calls of a submodule, or its call if it stays whole.

        Args:
            original: The call of its class.
            module: The submodule.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        # 1. Some calls of modules are no calls of submodules.
        if self._is_off or self._running[-1].module is module:
            # The class of a running module may call that of its base class.
            return original(module, *args, **kwargs)
        kind = type(module)
        path = self._paths.get(id(module))
        if path is None:
            # A module without parameters, such as an activation, may be created on the way; it is a function.
            tensors = [*module.parameters(), *module.buffers()]
            if tensors:
                self._note_obstacle(f"calls a {kind.__name__} that is not one of its submodules")
            return original(module, *args, **kwargs)

        # 2. Some submodules are one call.
        call = _ModuleCall(original, module, path, args, kwargs)
        if call.name in self._reasons:
            self.opaque[call.name] = self._reasons[call.name]
            return self._call_whole(call)
        if self._is_leaf(module):
            return self._call_whole(call)

        # 3. The others are followed.
        if isinstance(module, nn.TransformerEncoder):
            call = call._replace(original=encoded)
        return self._call_followed(call)

    def _is_leaf(self, module: nn.Module) -> bool:
        """Return True for a module that is one call: a layer of torch, or one with hooks or another forward."""
        has_hooks = id(module) in self._hooked_ids
        if has_hooks or is_checkpointed(module) or has_replaced_forward(module):
            return True
        followed = _FOLLOWED
        if module.training:
            followed += _FOLLOWED_IN_TRAINING
        if isinstance(module, followed):
            return False
        return type(module).__module__.startswith("torch.")

    def _call_whole(self, call: _ModuleCall) -> Any:
        # 1. The arguments, before the module may change them.
        with self._obstacles_noted(), _added_to_obstacle(call, self._reasons):
            self._check_modes()
            graph_args, graph_kwargs = self.arguments.convert_call(call.args, call.kwargs)
        received = _contents((call.args, call.kwargs))
        if self._is_off:
            # An obstacle was noted just now.
            return call.run()

        # 2. The call.
        with self._obstacles_noted(), _added_to_obstacle(call, self._reasons):
            computed = self._compute(call.run, (call.args, call.kwargs))
            self.effects.accept(call.module)
            _check_received(call.class_name, received)
            _check_result(call.class_name, computed.result)
            node = self._graph.create_node("call_module", call.path, graph_args, graph_kwargs)
            self.calls.finish(node, computed, self._place())

            # 3. A check of what it returns in later calls. Torch's own layers return the same structure in all of them.
            if not type(call.module).__module__.startswith("torch.nn."):
                structure = structure_of(computed.result)
                self._graph.call_function(check_structure, (node, structure)).meta[FOLLOWS] = True
        return computed.result

    def _call_followed(self, call: _ModuleCall) -> Any:
        """Call a submodule, and record its calls; or note that these would not be its forward."""
        # 1. Run the forward.
        running = _RunningModule(call.module, call.path)
        self._running.append(running)
        self.followed.append(call.module)
        try:
            result = call.run()
        except BaseException as error:
            self._running.pop()
            # The user's code may catch it, and continue in another way than in the next call.
            with self.paused():
                self._note_obstacle(f"{call.class_name} raises {type(error).__name__}")
            raise
        self._running.pop()

        # 2. This recording only looks for further obstacles from here on, if the submodule must stay whole.
        with self._obstacles_noted():
            obstacle = running.obstacle or self.effects.describe(call.module)
            if obstacle:
                self.obstacles[call.name] = obstacle
                self.effects.accept(call.module)
                node = self._graph.create_node("call_module", call.path)
                self.calls.finish(node, Computed(result, (), (), running.traits), self._place())
        return result


@contextmanager
def _added_to_obstacle(call: _ModuleCall, reasons: Mapping[str, str]) -> Iterator[None]:
    """Add to an obstacle in a call of a submodule that stays whole the reason why it does."""
    try:
        yield
    except Obstacle as obstacle:
        reason = reasons.get(call.name)
        if reason is not None:
            # The same error: another one would keep this one, its frames and their tensors.
            obstacle.args = (f"{obstacle}; and {call.class_name} cannot be followed: {reason}",)
        raise


def _check_function_arguments(args: Any) -> None:
    """Check that an autograd function receives no function, whose layers would not be known."""
    for value in args:
        is_function = isinstance(value, nn.Module) or inspect.isroutine(value)
        # Partial functions have this attribute.
        if is_function or hasattr(value, "func"):
            raise Obstacle("calls an autograd function with a function, which cannot be followed")


def _contents(value: Any) -> list[tuple[Any, list[Any]]]:
    """Return the containers in a nested value, the value among them, and the items of each."""
    items = items_of(value)
    if items is None:
        return []
    items = list(items)
    contents = [(value, items)]
    for item in items:
        contents.extend(_contents(item))
    return contents


def _check_received(name: str, contents: Sequence[tuple[Any, list[Any]]]) -> None:
    """Check that what stays whole has left containers that it received as they were.

    Raises:
        Obstacle: If it has other items in one: its recorded call would receive another object.
    """
    for container, items in contents:
        present = list(items_of(container) or ())
        has_same_length = len(present) == len(items)
        if not has_same_length or not all(map(is_, present, items)):
            raise Obstacle(f"{name} changes a {type(container).__name__} that it receives")


def _check_result(name: str, result: Any) -> None:
    """Check that what stays whole returns nothing but tensors, in containers.

    Raises:
        Obstacle: If it returns something that it may compute anew in each call.
    """
    for leaf in leaves_of(result):
        is_constant = isinstance(leaf, _CONSTANTS)
        if is_constant or isinstance(leaf, Tensor):
            continue
        raise Obstacle(f"{name} returns a {type(leaf).__name__}, which may change")
