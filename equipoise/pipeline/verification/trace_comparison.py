"""Compare a traced network with its forward, on the first call of each trace.

A value that only stands for a tensor answers some questions wrongly, and no error tells: `isinstance(x, Tensor)`,
`hasattr(x, "logits")`, `x.dtype is torch.float32`, an expected `TypeError` that never comes. The wrong branch is what
would train. So both are computed once for every trace, with the same random numbers and buffers, which are put back.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from inspect import currentframe
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from equipoise.interop.torch.dispatch import OperationWatch
from equipoise.memory.out_of_memory import is_out_of_memory
from equipoise.parallel.snapshot.preserve_state import preserve_state
from equipoise.pipeline.graph.call_structure import CallStructure
from equipoise.pipeline.graph.tracing import Traced
from equipoise.pipeline.graph.user_lines import line_of_user
from equipoise.pipeline.planning.loss_profile import preserve_containers
from equipoise.pipeline.planning.traced_calls import compute_uncut
from equipoise.pipeline.verification.layer_lending import is_of_torch, lent, lent_when_called
from equipoise.pipeline.verification.output_comparison import Output, prints_of

__all__ = ["Comparison", "Parting"]


@dataclass(frozen=True)
class Parting:
    """The place where a forward and what was followed of it part.

    Attributes:
        written: Line with which the forward goes on; empty where it is not known.
        followed: Line with which what was followed goes on; empty likewise.
        error: What the latter raised; None if it only computed something else.
        owners: Modules in whose forward it happened, the likeliest first; the network itself is not among them.
    """

    written: str
    followed: str
    error: Exception | None
    owners: list[nn.Module]

    def __str__(self) -> str:
        if self.error is not None:
            told = f"fails where the forward itself does not ({type(self.error).__name__}: {_first_line(self.error)})"
        else:
            told = "computes something else than the forward itself"
        places = [self.written, self.followed]
        if all(places) and places[0] != places[1]:
            return f"{told}. The forward goes on with {self.written}; what was followed goes on with {self.followed}"
        return f"{told}. They part at {places[0] or places[1]}" if any(places) else told


class Comparison:
    """Computes a call of a network both ways.

    Args:
        module: The user's module, whose buffers, attributes and metrics are put back.
        network: The network.
        forward: Its forward.
        structure: The call, with its tensors.
        device: Where both are computed. Layers that lie elsewhere are there while they are called.

    Attributes:
        is_possible: Whether the forward agrees with itself, as far as that had to be asked: without that nothing can be
            compared with it.
    """

    def __init__(
        self,
        module: nn.Module,
        network: nn.Module,
        forward: Callable[..., Any],
        structure: CallStructure,
        device: torch.device,
    ) -> None:
        self._module, self._network, self._forward = module, network, forward
        self._structure, self._device = structure, device
        self.is_possible = True
        self._keeps = False  # whether the forward goes backward by itself, and so needs what is saved for that
        # Of torch's encoder not the forward itself is followed, but one that computes the same in another way.
        self._same_graph = not any(isinstance(part, nn.TransformerEncoder) for part in network.modules())

    def parting(self, traced: Traced) -> Parting | None:
        """Compare what was followed with the forward.

        Args:
            traced: What was followed.

        Returns:
            Where they part; None if they agree, if both fail, or if the forward does not agree with itself.

        Raises:
            Exception: What the forward raises and the other does not; any error for want of memory.
        """
        expected, error = self._outcome(self._call_forward)
        made, other = self._outcome(partial(self._call_traced, traced))
        if error is not None and other is None:
            raise error
        if other is not None:
            return None if error is not None else self._locate(traced, other)
        assert expected is not None
        assert made is not None
        if made.agrees(expected):
            return None
        again, error = self._outcome(self._call_forward)
        self.is_possible = error is None and again is not None and again.agrees(expected)
        return self._locate(traced, None) if self.is_possible else None

    # Computation.

    def _outcome(self, compute: Callable[[], Any]) -> "tuple[Output | None, Exception | None]":
        """Return what a computation returned, or else what it raised."""
        try:
            return self._attempt(compute), None
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None, error

    def _attempt(self, compute: Callable[[], Any]) -> "Output":
        """Compute from the same state every time, and put that back."""
        try:
            return self._once(compute)
        except _Needed:
            self._keeps = True
            return self._once(compute)

    def _once(self, compute: Callable[[], Any]) -> "Output":
        with preserve_state(self._module), preserve_containers(self._module), ExitStack() as stack:
            if not self._keeps:
                stack.enter_context(saved_tensors_hooks(_drop, _refuse))
            return Output(compute(), with_graph=self._same_graph)

    def _tensors(self) -> list[Tensor]:
        """Return copies of the call's tensors, which the forward may change."""
        return [
            tensor.detach().clone().to(self._device).requires_grad_(tensor.requires_grad)
            for tensor in self._structure.tensors
        ]

    def _call_traced(self, traced: Traced, seen: Callable[[fx.Node, Any], None] | None = None) -> Any:
        return compute_uncut(traced, self._tensors(), self._device, place_layer=lent, on_value=seen)

    def _call_forward(self, watch: Callable[[str, Any, Any], None] | None = None) -> Any:
        args, kwargs = self._structure.fill(self._tensors())
        held = [*self._module.parameters(), *self._module.buffers()]
        with ExitStack() as stack:
            if any(tensor.device != self._device for tensor in held):
                stack.enter_context(lent_when_called(self._network, self._device))
                watch = watch or _ignore
            if watch is not None:
                operations = OperationWatch(watch, self._device)
                operations.start()
                stack.callback(operations.stop)
            return self._forward(*args, **kwargs)

    # Where they part.

    def _locate(self, traced: Traced, error: Exception | None) -> Parting:
        """Compute both once more, and find the first value of the one that the other does not come to."""
        names = {id(part): part for part in self._network.modules()}
        written: list[_Operation] = []
        followed: list[tuple[fx.Node, Any]] = []

        def watch(name: str, result: Any, args: Any) -> None:
            frame = currentframe()
            line = line_of_user(frame, Comparison._call_forward.__code__)
            written.append(_Operation(prints_of(result), line, _owners(frame, names)))

        def seen(node: fx.Node, value: Any) -> None:
            followed.append((node, prints_of(value) if node.op != "get_attr" else []))

        self._outcome(partial(self._call_forward, watch))
        self._outcome(partial(self._call_traced, traced, seen))
        node, reached = self._first_difference(written, followed, traced)
        after = written[reached] if reached < len(written) else None
        owners = [] if node is None else _owners_of(node, traced)
        owners += [] if after is None else after.owners
        return Parting(
            written="" if after is None else after.line,
            followed="" if node is None else str(node.meta.get("line", "")),
            error=error,
            owners=[part for part in owners if part is not self._network and not is_of_torch(part)],
        )

    def _first_difference(
        self, written: "Sequence[_Operation]", followed: Sequence[tuple[fx.Node, Any]], traced: Traced
    ) -> tuple[fx.Node | None, int]:
        """Return the first call whose value the forward does not come to, and the operation where that goes on.

        Args:
            written: Operations of the forward.
            followed: Calls that were followed, each with the prints of its values.
            traced: What was followed.
        """
        known = set(prints_of(self._structure.tensors))
        reached = 0
        for node, prints in followed:
            for one in prints:
                if one in known:
                    continue
                known.add(one)
                place = next((at for at in range(reached, len(written)) if one in written[at].prints), None)
                if place is None:
                    return node, reached
                reached = place + 1
        calls = traced.calls
        return (calls[len(followed)] if len(followed) < len(calls) else None), reached


@dataclass(frozen=True)
class _Operation:
    """One operation of a forward.

    Attributes:
        prints: What tells its values from others.
        line: Line of the user's that it goes back to.
        owners: Modules in whose forward it is, the innermost first.
    """

    prints: Sequence[Any]
    line: str
    owners: list[nn.Module]


def _owners(frame: FrameType | None, parts: Mapping[int, nn.Module]) -> list[nn.Module]:
    """Return the modules in whose methods a call is made, the innermost first."""
    found = []
    while frame is not None and frame.f_code is not Comparison._call_forward.__code__:
        holder = frame.f_locals.get("self")
        if isinstance(holder, nn.Module) and id(holder) in parts:
            found.append(holder)
        frame = frame.f_back
    return found


def _owners_of(node: fx.Node, traced: Traced) -> list[nn.Module]:
    """Return the modules in whose forwards a call was followed, the innermost first."""
    paths = [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return [traced.root.get_submodule(path) for path in reversed(paths) if path != str(node.target)]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _ignore(name: str, result: Any, args: Any) -> None:
    """Look at nothing."""


# What is saved for a backward is not needed, and would be the whole network's at once.


class _Needed(Exception):
    """Raised where the forward goes backward by itself."""


def _drop(tensor: Tensor) -> None:
    return None


def _refuse(packed: None) -> Tensor:
    raise _Needed
