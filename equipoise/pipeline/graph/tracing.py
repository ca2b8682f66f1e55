"""Trace the forward of a network into a list of calls.

`torch.fx` follows the forward symbolically. Some submodules cannot be traced: their code asks for values, draws random
numbers by itself, or stores a part of its input. Such a submodule stays whole: its recorded calls are removed, and its
own call is one entry of the list. What remains are obstacles in the network's own forward, which become errors.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from equipoise.interop.torch.modules import has_module_hooks
from equipoise.parallel.activation_checkpointing import is_checkpointed
from equipoise.pipeline.graph.call_structure import CallStructure
from equipoise.pipeline.graph.forward_effects import ForwardEffects
from equipoise.pipeline.graph.user_lines import describe_obstacle, is_assertion, line_of_user

__all__ = ["NotTraceable", "Traced", "trace", "writes_in_place"]

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_IN_PLACE = {"setitem", "ilshift", "irshift", *(f"i{name}" for name in _ARITHMETIC)}
_ENCODER_FORWARD = nn.TransformerEncoder.forward
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class NotTraceable(Exception):
    """Raised for a network whose forward cannot be traced.

    Attributes:
        obstacle: The first obstacle, with its line.
    """

    def __init__(self, obstacle: str) -> None:
        super().__init__(obstacle)
        self.obstacle = obstacle


class _Call(nn.Module):
    """A call of the network as a module whose forward takes a tuple of tensors."""

    def __init__(self, network: nn.Module, forward: Callable[..., Any], structure: CallStructure) -> None:
        super().__init__()
        self.network = network
        self._network_forward = forward
        self._structure = structure.without_tensors()

    def forward(self, tensors: Any) -> Any:
        args, kwargs = self._structure.fill(tensors)
        return self._network_forward(*args, **kwargs)


class Traced:
    """The calls of a forward.

    Args:
        root: Module to which the names in the graph refer.
        graph: The calls.
        opaque: For each submodule that stayed whole the reason.

    Attributes:
        writing: Calls that changed their arguments in place when they ran.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, opaque: dict[str, str]) -> None:
        self.root = root
        self.graph = graph
        self.opaque = opaque
        self.writing: set[fx.Node] = set()

    @property
    def calls(self) -> list[fx.Node]:
        """All computations, in order."""
        nodes = self.graph.nodes
        return [node for node in nodes if node.op not in ("placeholder", "output")]

    @property
    def signature(self) -> tuple[str, ...]:
        """Description of all calls, equal for forwards that make the same calls in the same order."""
        descriptions = []
        for node in self.calls:
            descriptions.append(f"{node.name} {node.op} {node.target}")
        return tuple(descriptions)


def trace(
    network: nn.Module,
    forward: Callable[..., Any],
    structure: CallStructure,
    opaque_types: Mapping[type[nn.Module], str] | None = None,
) -> Traced:
    """Trace a forward.

    Args:
        network: The network, in the mode (training or evaluation) in which it will run.
        forward: Its own forward.
        structure: Arguments of the call.
        opaque_types: Classes of submodules that stay whole, each with the reason, beside those that cannot be traced.
            Default: none.

    Raises:
        NotTraceable: If the network's own code cannot be traced.
    """
    if isinstance(network, nn.TransformerEncoder):
        function = getattr(forward, "__func__", None)
        # A subclass may have a forward of its own.
        if function is _ENCODER_FORWARD:
            forward = _encoder_forward(network)

    # 1. Trace, and undo what the forward changed before an error.
    root = _Call(network, forward, structure)
    effects = ForwardEffects(network)
    try:
        # With gradients also in an evaluation, whose trace may serve for training.
        with torch.enable_grad(), _saved_tensor_hooks_refused(), _autograd_functions_recorded():
            tracer = _Tracer(effects, opaque_types or {})
            graph = tracer.trace(root)
    except Exception as error:
        effects.restore()
        raise NotTraceable(describe_obstacle(error, forward)) from error

    # 2. Refuse a forward that has side effects: the traced calls would not have them.
    change = effects.describe()
    if change:
        effects.restore()
        raise NotTraceable(f"{type(network).__name__}.forward {change}")
    return Traced(root, graph, tracer.opaque)


@contextmanager
def _saved_tensor_hooks_refused() -> Iterator[None]:
    """Raise where activation checkpointing begins: a trace would lose it, since it consists of such hooks."""

    def refuse(hooks: Any) -> None:
        raise TypeError("activation checkpointing, or another hook on saved tensors, cannot be followed")

    with patch.object(saved_tensors_hooks, "__enter__", refuse):
        yield


@contextmanager
def _autograd_functions_recorded() -> Iterator[None]:
    """Record a call of an autograd function as one call. A trace of its forward would lose its backward."""
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        symbolic = [value for value in arguments if isinstance(value, fx.Proxy)]
        if not symbolic:
            return original.__func__(cls, *args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return cls.apply(*args, **kwargs)

        # The graph names the call after its class.
        call.__name__ = cls.__name__
        tracer = symbolic[0].tracer
        return tracer.create_proxy("call_function", call, args, kwargs)

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def holds(condition: Any) -> None:
    """Check an assertion of the user's when the forward runs.

    Raises:
        AssertionError: If the condition is false.
    """
    if not condition:
        raise AssertionError("an assertion in the network's forward does not hold")


class _Value(fx.Proxy):
    """A symbolic value. Operators that change it in place are recorded as calls, and return the same value."""


def _in_place_operator(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def change(self: _Value, *args: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, *args), {})

    return change


# torch.fx would replace `x += y` by `x = x + y`, which leaves views of x unchanged.
for _name in sorted(_IN_PLACE):
    setattr(_Value, f"__{_name}__", _in_place_operator(_name))


class _Tracer(fx.Tracer):
    """Trace what can be traced, and keep whole the submodules that cannot.

    Args:
        effects: State of the network before its forward.
        opaque_types: See `trace`.

    Attributes:
        opaque: For each submodule that stays whole the reason.
    """

    def __init__(self, effects: ForwardEffects, opaque_types: Mapping[type[nn.Module], str]) -> None:
        super().__init__()
        self.opaque: dict[str, str] = {}
        self._opaque_types = opaque_types
        # Of the modules whose forward is running, the outermost first.
        self._effects = [effects]
        self._modes = _modes()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Record a call.

        Raises:
            TypeError: If torch is in another mode than around the forward. The recorded call would not have that mode.
        """
        if _modes() != self._modes:
            raise TypeError("computed under torch.no_grad, torch.autocast or their like, which cannot be followed")
        node = super().create_node(*args, **kwargs)
        # No variable holds the frame: it would keep itself alive, and with it the tensors of the call.
        node.meta["line"] = line_of_user(inspect.currentframe())
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True for a module that is one call: torch's own layers, modules with hooks, checkpointed modules."""
        if is_checkpointed(m) or type(m) in self._opaque_types:
            return True
        if has_module_hooks(m):
            # Hooks must run at each call, and a trace would lose them.
            return True
        if isinstance(m, (*_CONTAINERS, nn.TransformerEncoder)):
            return False
        return bool(super().is_leaf_module(m, module_qualified_name))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the symbolic value of a call."""
        return _Value(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Return the truth value of a symbolic value: True in an assertion, which is recorded as a call.

        Raises:
            TraceError: If the value decides about anything else.
        """
        frame = inspect.currentframe()
        # Skip the frames of torch.fx and of this tracer.
        while frame is not None:
            module_name = frame.f_globals.get("__name__", "")
            if not module_name.startswith(("torch.fx", __name__)):
                break
            frame = frame.f_back
        if frame is not None and is_assertion(frame.f_code, frame.f_lasti):
            self.create_proxy("call_function", holds, (obj,), {})
            return True
        return bool(super().to_bool(obj))

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Trace a submodule, or record its call if that is impossible."""
        name = self.path_of_module(m)
        if type(m) in self._opaque_types:
            self._note_opaque(name, self._opaque_types[type(m)])
        if self.is_leaf_module(m, name):
            return super().call_module(m, forward, args, kwargs)
        if isinstance(m, nn.TransformerEncoder):
            forward = _encoder_forward(m)

        # 1. Note the state before.
        node_count = len(self.graph.nodes)
        stack = self.module_stack.copy()
        effects = ForwardEffects(m)

        # 2. Trace the forward.
        self._effects.append(effects)
        result = None
        try:
            result = super().call_module(m, forward, args, kwargs)
            obstacle = effects.describe()
        except Exception as error:
            obstacle = describe_obstacle(error, m.forward)
        finally:
            self._effects.pop()
        if not obstacle:
            return result

        # 3. Undo the trace, and record one call instead.
        effects.restore()
        for outer in self._effects:
            outer.ignore(effects)
        self.module_stack = stack
        new_nodes = list(self.graph.nodes)[node_count:]
        for node in reversed(new_nodes):
            self.graph.erase_node(node)
        self._note_opaque(name, obstacle)
        return self.create_proxy("call_module", name, args, kwargs)

    def _note_opaque(self, name: str, reason: str) -> None:
        name_in_network = name.removeprefix("network.")
        self.opaque[name_in_network] = reason


def _modes() -> tuple[Any, ...]:
    """Return the modes of torch that a forward may set for some of its calls."""
    autocast = []
    for kind in ("cpu", "cuda"):
        is_enabled = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind)
        autocast.append((is_enabled, dtype))
    return (torch.is_grad_enabled(), *autocast)


def _encoder_forward(encoder: nn.TransformerEncoder) -> Callable[..., Any]:
    """Return the forward of torch's TransformerEncoder without its branches on values and its shortcut in evaluations.

    Args:
        encoder: The encoder.
    """

    def forward(
        src: Any,
        mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: bool | None = None,
    ) -> Any:
        for layer in encoder.layers:
            src = layer(
                src,
                src_mask=mask,
                src_key_padding_mask=src_key_padding_mask,
            )
        if encoder.norm is None:
            return src
        return encoder.norm(src)

    return forward


def writes_in_place(node: fx.Node, root: nn.Module) -> bool:
    """Return True if a call changes its arguments in place, as far as its name shows.

    Args:
        node: The call.
        root: Root of the traced forward.
    """
    if node.op == "call_module":
        layer = root.get_submodule(str(node.target))
        return bool(getattr(layer, "inplace", False))
    if node.kwargs.get("inplace"):
        return True

    # Names that end with one underscore are those of in-place functions and methods.
    if node.op == "call_method":
        method_name = str(node.target)
        return method_name.endswith("_") and not method_name.startswith("_")
    function_name = getattr(node.target, "__name__", "")
    if function_name in _IN_PLACE:
        return True
    return function_name.endswith("_") and not function_name.endswith("__")
