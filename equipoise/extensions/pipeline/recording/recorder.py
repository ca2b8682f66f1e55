"""Record the calls of a forward while it runs.

The forward runs as it is, with real tensors: whatever it asks about them is answered truly. Calls of torch's functions
pass a mode of torch; calls of modules, of autograd functions and of checkpointing are patched. A submodule whose calls
alone would not be its forward stays whole: its recorded calls are removed, and its own call is recorded.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from equipoise.errors import ConfigurationError
from equipoise.extensions.pipeline.forward.forward_effects import ForwardEffects
from equipoise.extensions.pipeline.forward.operation_traits import Traits, traits_of
from equipoise.extensions.pipeline.forward.packed_sequences import padded_call
from equipoise.extensions.pipeline.forward.saved_tensors import REENTRANT_CHECKPOINTING
from equipoise.extensions.pipeline.graph.output_structure import items_of_output, structure_of
from equipoise.extensions.pipeline.graph.traced import FOLLOWS
from equipoise.extensions.pipeline.recording.arguments import Arguments
from equipoise.extensions.pipeline.recording.questions import Question, Questions
from equipoise.extensions.pipeline.recording.recorded_calls import ArgumentVersions, Computed, RecordedCalls
from equipoise.extensions.pipeline.recording.running_modules import RunningModule, RunningModules
from equipoise.extensions.pipeline.recording.targets import (
    Target,
    applied,
    assigned,
    check_structure,
    encoded,
    name_of,
    present_modes,
    target_of,
    under_modes,
)
from equipoise.extensions.pipeline.recording.tensor_nodes import Facts, Obstacle, TensorNodes
from equipoise.interop.torch.modules import has_module_hooks
from equipoise.parallel.activation_checkpointing import is_checkpointed
from equipoise.strategies.replaced_forwards import has_replaced_forward
from equipoise.tree import leaves_of, tensors_in

__all__ = ["Recorder"]

# Torch's modules that are followed, since they call layers of the user's.
_FOLLOWED = (
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
# Functions that return as many tensors as follows from sizes.
_LISTS = _SPLITS | {"chunk", "split", "split_with_sizes", "unbind", "unsafe_chunk", "unsafe_split"}
_LISTS |= {"unsafe_split_with_sizes"}
# What an opaque submodule may return beside tensors; it is taken for a constant.
_CONSTANTS = (str, torch.dtype, torch.device, type(None))
_CHECKPOINTING = "activation checkpointing, or another hook on saved tensors, cannot be followed"
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
    def class_name(self) -> str:
        """Name of the submodule's class."""
        return type(self.module).__name__


class Recorder(_Base):  # type: ignore[misc]
    """Record the calls of a network's forward, within a context.

    Args:
        graph: Receives the calls.
        root: Root of the graph; its attribute `network` is the network.
        inputs: The network's tensors, and the calls that take them from its arguments.
        device: Device of these tensors. A call that names it names the device of its stage instead.
        opaque_types: Classes of submodules that stay whole, each with the reason.

    Attributes:
        opaque: For each submodule that stayed whole the reason.
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
        opaque_types: Mapping[type[nn.Module], str],
    ) -> None:
        super().__init__()
        # 1. The network, as it is before its forward.
        network = root.get_submodule("network")
        self.opaque: dict[str, str] = {}
        self.followed: list[nn.Module] = [network]
        self.effects = ForwardEffects(network)
        self._graph = graph
        self._opaque_types = opaque_types
        self._modes = present_modes()
        self._hooked_ids = _hooked_ids(network)

        # 2. The calls so far, which take the network's tensors from its arguments.
        self._tensors = TensorNodes(graph, root)
        tensors = [tensor for tensor, _ in inputs]
        for index, (tensor, node) in enumerate(inputs):
            facts = Facts(frozenset([index]), is_pure=True)
            self._tensors.add(tensor, node)
            self._tensors.facts[node] = facts
            self._tensors.note_operation(tensor, ())
        self.arguments = Arguments(graph, self._tensors, device)
        self.questions = Questions(graph, root, self._tensors, self.arguments, tensors)
        self.calls = RecordedCalls(graph, self._tensors, device)

        # 3. The state of the recording. Other threads may call modules meanwhile.
        self._running = RunningModules(root, network, self.calls.count)
        self._thread = threading.get_ident()
        self._is_paused = False
        # Traits of the operations of the present call.
        self._traits = Traits(0)

    @property
    def obstacle(self) -> str:
        """Reason why the network's calls alone would not be its forward; empty if there is none."""
        return self._running.network.obstacle

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
        has_obstacle = bool(self._running.innermost.obstacle)
        is_elsewhere = threading.get_ident() != self._thread
        return self._is_paused or has_obstacle or is_elsewhere

    @contextmanager
    def _obstacles_noted(self) -> Iterator[None]:
        """Let calls pass within the context, and note an obstacle or another error that is raised there."""
        with self.paused():
            try:
                yield
            except Obstacle as obstacle:
                self._running.note_obstacle(str(obstacle))
                # From Python 3.12 on, the traceback and the frame of `with` keep each other, and tensors of the step.
                obstacle.with_traceback(None)
            except Exception as error:
                # The user's code may catch it, and continue in another way than in the next call.
                self._running.note_obstacle(f"raises {type(error).__name__}")
                raise

    # Notices.

    def on_saved_tensor_hooks(self) -> None:
        """Note that activation checkpointing begins: the calls would be without it."""
        if not self._is_off:
            self._running.note_obstacle(_CHECKPOINTING)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Note that a value is logged: the calls would not log it."""
        if not self._is_off:
            self._running.note_obstacle("logs a value, which only the step itself may do")

    def on_progress(self, name: str) -> None:
        """Note that the forward asks how far the run is: the calls would keep the answer.

        Args:
            name: Name of the property that it reads.
        """
        if not self._is_off:
            self._running.note_obstacle(f"reads `{name}`, which changes in the run")

    def on_operation(self, name: str, result: Any, args: Any) -> None:
        """Note an operation of torch, below its functions.

        Args:
            name: Its name, such as "addmm".
            result: Its result.
            args: Its positional arguments.
        """
        traits = traits_of(name, args)
        self._traits |= traits
        self._running.note_traits(traits)
        self._tensors.note_operation(result, args)

    # Functions.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_off:
            return func(*args, **kwargs)
        with self._obstacles_noted():
            # Calls within the function are no calls of the forward.
            computed = self._compute(func, args, kwargs)
            self._record_function(func, args, kwargs, computed)
        return computed.result

    def _compute(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Computed:
        argument_versions = ArgumentVersions((args, kwargs))
        self._traits = Traits(0)
        result = function(*args, **kwargs)
        changed = argument_versions.changed()
        return Computed(result, changed, self._traits)

    def _record_function(self, function: Any, args: Any, kwargs: Any, computed: Computed) -> None:
        # 1. A function without tensors in its result asks a question.
        name = name_of(function)
        if name in _BACKWARDS:
            raise Obstacle("runs backward by itself")
        results = list(tensors_in(computed.result, items_of_output))
        if not results and not computed.changed:
            # No variable holds the frame: it would keep itself alive, and with it the tensors of the call.
            question = Question(function, name, args, kwargs, computed.result)
            self.questions.note(question, inspect.currentframe())
            return

        # 2. A function that only returns its argument is no call.
        is_in_place = name.endswith("_") and not name.endswith("__")
        returns_arguments = _are_among(results, (args, kwargs))
        if returns_arguments and not computed.changed and not is_in_place:
            return

        # 3. Some functions need another call than their own.
        target = target_of(function)
        if name == "_pad_packed_sequence":
            padded, args = padded_call(args, inspect.currentframe())
            target = Target("call_function", padded)
        if name == "__setitem__":
            target = Target("call_function", assigned)
            computed = computed._replace(result=args[0])
        modes = present_modes()
        if modes != self._modes:
            target = under_modes(target, modes)

        # 4. Record the call.
        graph_args, graph_kwargs = self.arguments.of_call(args, kwargs)
        node = target.add_to(self._graph, graph_args, graph_kwargs)
        arguments = list(tensors_in((args, kwargs), items_of_output))
        if name in _SPLITS and len(arguments) > 1:
            # Torch computes these by slices, whose bounds are values of the second tensor.
            traits = computed.traits | Traits.DYNAMIC
            computed = computed._replace(traits=traits)
        computed = computed._replace(is_pure=not is_in_place)
        self.calls.finish(node, computed, self._running.place())

        # 5. The number of tensors in a list is a size, for which the forward need not ask.
        if name in _LISTS:
            self.questions.note_length(arguments, results)

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
            computed = self._compute(original, (kind, *args), kwargs)
            if kind is CheckpointFunction and _requires_gradients(computed.result):
                raise ConfigurationError(REENTRANT_CHECKPOINTING)

            # 2. Its record.
            _check_function_arguments(args)
            self._check_modes()
            graph_args, graph_kwargs = self.arguments.of_call(args, kwargs)
            node = applied(kind).add_to(self._graph, graph_args, graph_kwargs)
            _check_result(kind.__name__, computed.result)
            self.calls.finish(node, computed, self._running.place())
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
        if self._is_off or self._running.innermost.module is module:
            # The class of a running module may call that of its base class.
            return original(module, *args, **kwargs)
        kind = type(module)
        path = self._running.path_of(module)
        if path is None:
            # A module without parameters, such as an activation, may be created on the way; it is a function.
            tensors = [*module.parameters(), *module.buffers()]
            if tensors:
                self._running.note_obstacle(f"calls a {kind.__name__} that is not one of its submodules")
            return original(module, *args, **kwargs)

        # 2. Some submodules are one call.
        is_opaque = kind in self._opaque_types
        if is_opaque:
            reason = self._opaque_types[kind]
            self._note_opaque(path, reason)
        call = _ModuleCall(original, module, path, args, kwargs)
        if is_opaque or self._is_leaf(module):
            return self._call_whole(call)

        # 3. The others are followed.
        if isinstance(module, nn.TransformerEncoder):
            call = call._replace(original=encoded)
        return self._call_followed(call)

    def _is_leaf(self, module: nn.Module) -> bool:
        """Return True for a module that is one call: a layer of torch, or one with hooks or another forward."""
        if is_checkpointed(module) or has_replaced_forward(module) or id(module) in self._hooked_ids:
            return True
        if isinstance(module, _FOLLOWED) or (module.training and isinstance(module, _FOLLOWED_IN_TRAINING)):
            return False
        return type(module).__module__.startswith("torch.")

    def _call_whole(self, call: _ModuleCall) -> Any:
        # 1. The arguments, before the module may change them.
        with self._obstacles_noted():
            self._check_modes()
            graph_args, graph_kwargs = self.arguments.of_call(call.args, call.kwargs)
        if self._is_off:
            # An obstacle was noted just now.
            return call.run()

        # 2. The call.
        with self._obstacles_noted():
            computed = self._compute(call.original, (call.module, *call.args), call.kwargs)
            self.effects.accept(call.module)
            self._add_whole(call, graph_args, graph_kwargs, computed)
        return computed.result

    def _call_followed(self, call: _ModuleCall) -> Any:
        """Call a submodule, and record its calls; or its own, if these would not be its forward."""
        # 1. Note the state of the recording before its calls.
        with self.paused():
            argument_versions = ArgumentVersions((call.args, call.kwargs))
            running = RunningModule(
                call.module,
                self.calls.count,
                self.questions.count,
                len(self.followed),
                self._recorded_of(argument_versions.tensors),
            )

        # 2. Run the forward.
        self._running.push(running)
        self.followed.append(call.module)
        try:
            result = call.run()
        except BaseException as error:
            self._running.pop()
            # The user's code may catch it, and continue in another way than in the next call.
            with self.paused():
                self._running.note_obstacle(f"{call.class_name} raises {type(error).__name__}")
            raise
        self._running.pop()

        # 3. Keep its calls, or record its own instead.
        with self._obstacles_noted():
            obstacle = running.obstacle or self.effects.describe(call.module)
            if obstacle:
                changed = argument_versions.changed()
                computed = Computed(result, changed, running.traits)
                self._remove_calls_of(running, call.path)
                self._note_opaque(call.path, obstacle)
                try:
                    self._record_whole(call, computed)
                except Obstacle as outer:
                    raise Obstacle(f"{outer}; and {call.class_name} cannot be followed: {obstacle}") from None
        return result

    def _record_whole(self, call: _ModuleCall, computed: Computed) -> None:
        """Record the call of a submodule in the place of its calls.

        Raises:
            Obstacle: If its call cannot be recorded either.
        """
        self._check_modes()
        graph_args, graph_kwargs = self.arguments.of_call(call.args, call.kwargs)
        self._add_whole(call, graph_args, graph_kwargs, computed)

    def _add_whole(self, call: _ModuleCall, graph_args: Any, graph_kwargs: Any, computed: Computed) -> None:
        """Add the call of a submodule to the graph, and a check of what it returns in later calls.

        Raises:
            Obstacle: If it returns something that may change from call to call.
        """
        # 1. The call.
        _check_result(call.class_name, computed.result)
        node = self._graph.create_node("call_module", call.path, graph_args, graph_kwargs)
        self.calls.finish(node, computed, self._running.place())

        # 2. The check. Torch's own layers return the same structure in all calls.
        if not type(call.module).__module__.startswith("torch.nn."):
            structure = structure_of(computed.result)
            check = self._graph.call_function(check_structure, (node, structure))
            check.meta[FOLLOWS] = True
            self._tensors.facts[check] = Facts(frozenset(), is_pure=False)

    def _recorded_of(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, fx.Node]]:
        """Return those of some tensors that are values of calls, and these calls."""
        recorded = []
        for tensor in tensors:
            node = self._tensors.find_node(tensor)
            if node is not None:
                recorded.append((tensor, node))
        return recorded

    def _remove_calls_of(self, running: RunningModule, path: str) -> None:
        """Remove the calls and questions of a module that stays whole, and its submodules from the records."""
        self.effects.accept(running.module)
        self.questions.forget_since(running.question_count)
        self.calls.remove_since(running.call_count)
        del self.followed[running.followed_count :]
        # Its arguments are again the values of the calls before it.
        for tensor, node in running.arguments:
            self._tensors.add(tensor, node)
        name = path.removeprefix("network.")
        for name_of_opaque in list(self.opaque):
            if name_of_opaque.startswith(f"{name}."):
                del self.opaque[name_of_opaque]

    def _note_opaque(self, path: str, reason: str) -> None:
        name_in_network = path.removeprefix("network.")
        self.opaque[name_in_network] = reason


def _hooked_ids(network: nn.Module) -> set[int]:
    """Return the ids of the modules with hooks, which must run at each call.

    Some hooks are registered later, for the recording alone.
    """
    ids = set()
    for module in network.modules():
        if has_module_hooks(module):
            ids.add(id(module))
    return ids


def _are_among(tensors: Sequence[Tensor], arguments: Any) -> bool:
    argument_ids = {id(tensor) for tensor in tensors_in(arguments, items_of_output)}
    return all(id(tensor) in argument_ids for tensor in tensors)


def _requires_gradients(value: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(value, items_of_output))


def _check_function_arguments(args: Any) -> None:
    """Check that an autograd function receives no function, whose layers would not be known."""
    for value in args:
        is_function = isinstance(value, nn.Module) or inspect.isroutine(value)
        # Partial functions have this attribute.
        if is_function or hasattr(value, "func"):
            raise Obstacle("calls an autograd function with a function, which cannot be followed")


def _check_result(name: str, result: Any) -> None:
    """Check that what stays whole returns nothing but tensors, in containers.

    Raises:
        Obstacle: If it returns something that it may compute anew in each call.
    """
    for leaf in leaves_of(result, items_of_output):
        is_constant = isinstance(leaf, _CONSTANTS)
        if is_constant or isinstance(leaf, Tensor):
            continue
        name_of_leaf = type(leaf).__name__
        raise Obstacle(f"{name} returns a {name_of_leaf}, which may change")
