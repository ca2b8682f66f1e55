"""Trace the forward of a network into a list of calls.

`torch.fx` follows the forward symbolically. A submodule that it cannot follow (whose code asks for values, draws random
numbers by itself, or keeps something of what it sees) stays whole: what was recorded of it is taken back, and its call
is one entry of the list. What remains are obstacles in the network's own forward, and those are told.
"""

import dis
import inspect
import linecache
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from equipoise.interop.torch.modules import has_module_hooks
from equipoise.parallel.activation_checkpointing import is_checkpointed
from equipoise.pipeline.graph.call_structure import CallStructure
from equipoise.pipeline.graph.forward_effects import ForwardEffects

__all__ = ["NotTraceable", "Traced", "line_of_user", "trace", "writes_in_place"]

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_IN_PLACE = {"setitem", "ilshift", "irshift", *(f"i{name}" for name in _ARITHMETIC)}
_ENCODER_FORWARD = nn.TransformerEncoder.forward
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NOT_THE_USERS = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))


class NotTraceable(Exception):
    """A network whose forward cannot be followed.

    Attributes:
        obstacle: The first thing that stood in the way, with its place.
    """

    def __init__(self, obstacle: str) -> None:
        super().__init__(obstacle)
        self.obstacle = obstacle


class _Call(nn.Module):
    """A call of the network as a module whose forward takes a tuple of tensors."""

    def __init__(self, network: nn.Module, forward: Callable[..., Any], structure: CallStructure) -> None:
        super().__init__()
        self.network = network
        self._own, self._structure = forward, structure.without_tensors()

    def forward(self, tensors: Any) -> Any:
        args, kwargs = self._structure.fill(tensors)
        return self._own(*args, **kwargs)


class Traced:
    """The calls of a forward.

    Attributes:
        root: What the names in the graph refer to.
        graph: The calls.
        opaque: For each submodule that stayed whole the reason.
        writing: Calls that were seen to change their arguments.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, opaque: dict[str, str]) -> None:
        self.root, self.graph, self.opaque = root, graph, opaque
        self.writing: set[fx.Node] = set()

    @property
    def calls(self) -> list[fx.Node]:
        """Everything that is computed, in order."""
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]

    @property
    def signature(self) -> tuple[str, ...]:
        """The same for forwards that call the same things in the same order."""
        return tuple(f"{node.name} {node.op} {node.target}" for node in self.calls)


def trace(
    network: nn.Module,
    forward: Callable[..., Any],
    structure: CallStructure,
    whole: Mapping[type[nn.Module], str] | None = None,
) -> Traced:
    """Follows a forward.

    Args:
        network: The network, in the mode (training or evaluation) in which it is to run.
        forward: Its own forward.
        structure: How it is called.
        whole: Classes of submodules that stay whole, each with the reason. Default: those that cannot be followed.

    Raises:
        NotTraceable: If the network's own code stands in the way.
    """
    if isinstance(network, nn.TransformerEncoder) and getattr(forward, "__func__", None) is _ENCODER_FORWARD:
        forward = _encoder_forward(network)
    root = _Call(network, forward, structure)
    before = ForwardEffects(network)
    try:
        # In an evaluation, too, whose trace may serve for training.
        with torch.enable_grad(), _without_saving_hooks(), _functions_kept():
            tracer = _Tracer(before, whole or {})
            graph = tracer.trace(root)
    except Exception as error:
        before.restore()
        raise NotTraceable(_obstacle(error, forward)) from error
    if moved := before.moved():
        before.restore()
        raise NotTraceable(f"{type(network).__name__}.forward {moved}")
    return Traced(root, graph, tracer.opaque)


@contextmanager
def _without_saving_hooks() -> Iterator[None]:
    """Keeps activation checkpointing, which lives in such hooks, from being followed and so lost."""

    def refuse(hooks: Any) -> None:
        raise TypeError("activation checkpointing, or another hook on saved tensors, cannot be followed")

    with patch.object(saved_tensors_hooks, "__enter__", refuse):
        yield


@contextmanager
def _functions_kept() -> Iterator[None]:
    """A call of an autograd function stays one: followed, its forward alone would remain, and lose its backward."""
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, fx.Proxy)), None)
        if given is None:
            return original.__func__(cls, *args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return cls.apply(*args, **kwargs)

        call.__name__ = cls.__name__
        return given.tracer.create_proxy("call_function", call, args, kwargs)

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def holds(condition: Any) -> None:
    """An assertion of the user's, at the place of the forward where it stands."""
    if not condition:
        raise AssertionError("an assertion in the network's forward does not hold")


class _Value(fx.Proxy):
    """What stands for a value; operators that change it in place are calls of their own, not new values."""


def _record_in_place(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def change(self: _Value, *args: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, *args), {})

    return change


for _name in sorted(_IN_PLACE):
    setattr(_Value, f"__{_name}__", _record_in_place(_name))


class _Tracer(fx.Tracer):
    """Follows what can be followed and takes back what cannot."""

    def __init__(self, effects: ForwardEffects, whole: Mapping[type[nn.Module], str]) -> None:
        super().__init__()
        self.opaque: dict[str, str] = {}
        self.whole = whole
        self.effects = [effects]  # of the modules in whose forward it is
        self._modes = _modes()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A call; where torch is in another mode than around the forward, the call would lose it."""
        if _modes() != self._modes:
            raise TypeError("computed under torch.no_grad, torch.autocast or their like, which cannot be followed")
        node = super().create_node(*args, **kwargs)
        node.meta["line"] = line_of_user(inspect.currentframe())
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Torch's own layers are one call; so is what has hooks, which must run at each call, or is checkpointed."""
        if is_checkpointed(m) or type(m) in self.whole:
            return True
        if isinstance(m, _CONTAINERS) and not has_module_hooks(m):
            return False
        if isinstance(m, nn.TransformerEncoder) and not has_module_hooks(m):
            return False
        return bool(super().is_leaf_module(m, module_qualified_name)) or has_module_hooks(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What stands for the value of a call."""
        return _Value(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """A question about a value: an assertion is asked when the forward runs, anything else cannot be followed."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch.fx", __name__)):
            frame = frame.f_back
        if frame is not None and _asserts(frame.f_code, frame.f_lasti):
            self.create_proxy("call_function", holds, (obj,), {})
            return True
        return bool(super().to_bool(obj))

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a submodule."""
        name = self.path_of_module(m)
        if type(m) in self.whole:
            self.opaque[name.removeprefix("network.")] = self.whole[type(m)]
        if self.is_leaf_module(m, name):
            return super().call_module(m, forward, args, kwargs)
        if isinstance(m, nn.TransformerEncoder):
            forward = _encoder_forward(m)
        count, before, stack = len(self.graph.nodes), ForwardEffects(m), self.module_stack.copy()
        self.effects.append(before)
        try:
            answer = super().call_module(m, forward, args, kwargs)
            reason = before.moved()
        except Exception as error:
            answer, reason = None, _obstacle(error, m.forward)
        finally:
            self.effects.pop()
        if not reason:
            return answer
        before.restore()
        for outer in self.effects:
            outer.overlook(before)
        self.module_stack = stack
        for node in list(self.graph.nodes)[count:][::-1]:
            self.graph.erase_node(node)
        self.opaque[name.removeprefix("network.")] = reason
        return self.create_proxy("call_module", name, args, kwargs)


def _modes() -> tuple[Any, ...]:
    """What a forward may set for some of its calls."""
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return (torch.is_grad_enabled(), *casts)


def _encoder_forward(encoder: nn.TransformerEncoder) -> Callable[..., Any]:
    """What torch's TransformerEncoder computes, without its questions about values and its shortcut in evaluations."""

    def forward(src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None) -> Any:
        for layer in encoder.layers:
            src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
        return src if encoder.norm is None else encoder.norm(src)

    return forward


def _asserts(code: Any, position: int) -> bool:
    """Whether the value that is asked for at a place of a function decides about an assertion and nothing else."""
    following = [one for one in dis.get_instructions(code) if one.offset >= position and one.opname != "TO_BOOL"]
    if len(following) < 2:
        return False
    jump, otherwise = following[:2]
    if "IF_FALSE" in jump.opname:  # one of several conditions
        otherwise = next((one for one in following if one.offset == jump.argval), jump)
    return "JUMP_IF" in jump.opname.replace("_FORWARD", "") and otherwise.opname == "LOAD_ASSERTION_ERROR"


def _obstacle(error: Exception, forward: Callable[..., Any]) -> str:
    """What stood in the way, and the line of the user's where it was."""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    frames = inspect.trace() if error is sys.exc_info()[1] else []
    code = getattr(inspect.unwrap(forward), "__code__", None)
    for frame in reversed(frames):
        if code is not None and frame.frame.f_code is code:
            return f"{_told(frame.frame.f_code, frame.lineno)} ({text})"
    return text


def line_of_user(frame: FrameType | None, last: CodeType | None = None) -> str:
    """Return the line that a call goes back to, of the innermost function that is neither torch's nor ours.

    Args:
        frame: The frame of the call.
        last: Code at which to stop. Default: the search goes on to the outermost frame.

    Returns:
        Function, number and text of the line; empty if there is none.
    """
    while frame is not None and frame.f_code is not last:
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            return _told(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


def _told(code: CodeType, number: int) -> str:
    line = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_qualname}, line {number}: `{line}`"


def writes_in_place(node: fx.Node, root: nn.Module) -> bool:
    """Whether a call changes its arguments, as far as its name tells."""
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    if node.kwargs.get("inplace"):
        return True
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.startswith("_")
    name = getattr(node.target, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
