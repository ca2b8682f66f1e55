"""Compare a traced network with its forward, on the first call of each trace.

A forward may depend on what no recording sees: a global variable, an object of another module, a file. The wrong branch
would then be trained, without an error. So both are computed once for every trace, with the same random numbers and
buffers. The state is restored afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import currentframe
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from equipoise.extensions.pipeline.forward.layer_lending import computed_on, is_of_torch
from equipoise.extensions.pipeline.forward.module_hooks import preserved_hooks
from equipoise.extensions.pipeline.forward.saved_tensors import without_saved_tensors
from equipoise.extensions.pipeline.forward.user_lines import line_of_user
from equipoise.extensions.pipeline.graph.call_structure import CallStructure
from equipoise.extensions.pipeline.graph.traced import CallInterpreter, Traced
from equipoise.extensions.pipeline.verification.output_comparison import Output, fingerprints_of
from equipoise.interop.call_patches import patched_logging
from equipoise.interop.lightning.classes import module_classes
from equipoise.interop.torch.dispatch import OnOperation
from equipoise.memory.out_of_memory import is_out_of_memory
from equipoise.parallel.snapshot.preserve_state import preserve_state

__all__ = ["Comparison", "Parting"]


@dataclass(frozen=True)
class Parting:
    """The first difference between a forward and its trace.

    Attributes:
        written: Line with which the forward continues; empty if unknown.
        followed: Line with which the trace continues; empty if unknown.
        error: Error that the trace raised; None if it only computed something else.
        owners: Modules in whose forward they differ, the likeliest first, without the network itself.
    """

    written: str
    followed: str
    error: Exception | None
    owners: list[nn.Module]

    def __str__(self) -> str:
        if self.error is None:
            message = "computes something else than the forward itself"
        else:
            kind = type(self.error).__name__
            message = f"fails where the forward itself does not ({kind}: {_first_line(self.error)})"
        line = self.written or self.followed
        if not line:
            return message
        if self.written and self.followed and self.written != self.followed:
            return (
                f"{message}. The forward continues with {self.written}; what was followed continues with"
                f" {self.followed}"
            )
        return f"{message}. They part at {line}"


class Comparison:
    """Compute a call of a network by its forward and by its trace.

    Args:
        module: The user's module, whose buffers, attributes and metrics are restored.
        network: The network.
        forward: Its forward.
        structure: The call, with its tensors.
        device: Device of both computations. Layers on other devices are lent to it while they are called.

    Attributes:
        is_possible: False if the forward differs from itself when it is repeated: then nothing can be compared with
            it.
    """

    def __init__(
        self,
        module: nn.Module,
        network: nn.Module,
        forward: Callable[..., Any],
        structure: CallStructure,
        device: torch.device,
    ) -> None:
        self.is_possible = True
        self._module = module
        self._network = network
        self._forward = forward
        self._structure = structure
        self._device = device
        # Torch's encoder is traced by another forward, which computes the same values with another graph.
        has_encoder = any(isinstance(submodule, nn.TransformerEncoder) for submodule in network.modules())
        self._compares_graphs = not has_encoder

    def parting(self, traced: Traced) -> Parting | None:
        """Compare a trace with the forward.

        Args:
            traced: The trace.

        Returns:
            The first difference; None if they agree, if both fail, or if the forward differs from itself.

        Raises:
            Exception: An error that the forward raises and the trace does not; any out-of-memory error.
        """
        # 1. Compute both. An error is a difference only if the other has none.
        expected, error = self._outcome(self._call_forward)
        output, error_of_trace = self._outcome(partial(self._call_traced, traced))
        if error_of_trace is not None:
            if error is not None:
                return None
            return self._locate(traced, error_of_trace)
        if error is not None:
            raise error

        # 2. Compare the outputs.
        assert expected is not None
        assert output is not None
        if output.agrees(expected):
            return None

        # 3. Repeat the forward: a difference means nothing if the forward differs from itself.
        repeated, error = self._outcome(self._call_forward)
        self.is_possible = error is None and repeated is not None and repeated.agrees(expected)
        if not self.is_possible:
            return None
        return self._locate(traced, None)

    # Computation.

    def _outcome(self, compute: Callable[[], Any]) -> tuple[Output | None, Exception | None]:
        try:
            return without_saved_tensors(partial(self._compute, compute)), None
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None, error

    def _compute(self, compute: Callable[[], Any]) -> Output:
        """Compute from the same state every time, and restore that."""
        silent = patched_logging(module_classes(), _ignore)
        with preserve_state(self._module, containers=True), preserved_hooks(self._module), silent:
            value = compute()
            return Output(value, with_graph=self._compares_graphs)

    def _call_traced(self, traced: Traced, on_value: Callable[[fx.Node, Any], None] | None = None) -> Any:
        calls = _WatchedCalls(traced, self._device, on_value)
        return traced.output.fill(calls.run(tuple(self._structure.copies_on(self._device))))

    def _call_forward(self, on_operation: OnOperation | None = None) -> Any:
        tensors = self._structure.copies_on(self._device)
        args, kwargs = self._structure.fill(tensors)
        with computed_on(self._device, self._network, self._module, on_operation):
            return self._forward(*args, **kwargs)

    # The first difference.

    def _locate(self, traced: Traced, error: Exception | None) -> Parting:
        """Compute both once more, and find the first value of the trace that the forward does not compute."""
        module_ids = {id(module) for module in self._network.modules()}
        operations: list[_Operation] = []
        calls: list[tuple[fx.Node, list[Any]]] = []

        def on_operation(name: str, result: Any, args: Any) -> None:
            frame = currentframe()
            line = line_of_user(frame, Comparison._call_forward.__code__)
            owners = _owners_of_frame(frame, module_ids)
            operation = _Operation(fingerprints_of(result), line, owners)
            operations.append(operation)

        def on_value(node: fx.Node, value: Any) -> None:
            fingerprints = []
            # The forward has no operation for a tensor that it looks up.
            if node.op != "get_attr":
                fingerprints = fingerprints_of(value)
            calls.append((node, fingerprints))

        # 1. Compute both, and note all values.
        run_forward = partial(self._call_forward, on_operation)
        run_trace = partial(self._call_traced, traced, on_value)
        self._outcome(run_forward)
        self._outcome(run_trace)

        # 2. Find the call and the operation with which they continue.
        node, index = self._first_difference(operations, calls, traced)
        owners: list[nn.Module] = []
        written = ""
        followed = ""
        if node is not None:
            followed = str(node.meta.get("line", ""))
            owners += _owners_of_call(node, traced)
        if index < len(operations):
            operation = operations[index]
            written = operation.line
            owners += operation.owners

        # 3. Leave out the network itself and torch's layers: only the user's submodules can stay whole.
        users_modules = []
        for module in owners:
            if module is not self._network and not is_of_torch(module):
                users_modules.append(module)
        return Parting(written, followed, error, users_modules)

    def _first_difference(
        self, operations: "Sequence[_Operation]", calls: Sequence[tuple[fx.Node, list[Any]]], traced: Traced
    ) -> tuple[fx.Node | None, int]:
        """Return the first call whose value the forward does not compute, and the index of its next operation."""
        # 1. Look for each new value of the trace among the operations after the last match.
        visited = set(fingerprints_of(self._structure.tensors))
        index = 0
        for node, fingerprints in calls:
            for fingerprint in fingerprints:
                if fingerprint in visited:
                    continue
                visited.add(fingerprint)
                match = _index_of(fingerprint, operations, index)
                if match is None:
                    return node, index
                index = match + 1

        # 2. All values are the same as far as the trace came: it failed at its next call.
        if len(calls) < len(traced.calls):
            return traced.calls[len(calls)], index
        return None, index


@dataclass(frozen=True)
class _Operation:
    """One operation of a forward.

    Attributes:
        fingerprints: Fingerprints of its values.
        line: The user's line from which it comes.
        owners: Modules in whose forward it is, the innermost first.
    """

    fingerprints: Sequence[Any]
    line: str
    owners: list[nn.Module]


class _WatchedCalls(CallInterpreter):
    """Run the calls of a trace, and report their values.

    Args:
        traced: The trace.
        device: Device of the computation.
        on_value: Receives each call and its value. None: nothing is reported.
    """

    def __init__(self, traced: Traced, device: torch.device, on_value: Callable[[fx.Node, Any], None] | None) -> None:
        super().__init__(traced.root, traced.graph, device)
        self._on_value = on_value

    def run_node(self, node: fx.Node) -> Any:
        """Return the value of a call."""
        value = super().run_node(node)
        if self._on_value is not None and node.op not in ("placeholder", "output"):
            self._on_value(node, value)
        return value


def _index_of(fingerprint: Any, operations: Sequence[_Operation], begin: int) -> int | None:
    """Return the index of the first operation from `begin` on that computes a value; None if there is none."""
    for index in range(begin, len(operations)):
        if fingerprint in operations[index].fingerprints:
            return index
    return None


def _owners_of_frame(frame: FrameType | None, module_ids: set[int]) -> list[nn.Module]:
    """Return the modules in whose methods a frame is, the innermost first."""
    owners = []
    while frame is not None and frame.f_code is not Comparison._call_forward.__code__:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in module_ids:
            owners.append(owner)
        frame = frame.f_back
    return owners


def _owners_of_call(node: fx.Node, traced: Traced) -> list[nn.Module]:
    """Return the modules in whose forwards a call was traced, the innermost first."""
    stack = node.meta.get("nn_module_stack", {})
    owners = []
    for path, _ in reversed(stack.values()):
        name = str(path)
        # A layer that is called is no owner of the call.
        if name != str(node.target):
            owners.append(traced.root.get_submodule(name))
    return owners


def _first_line(error: Exception) -> str:
    message = str(error).strip()
    return message.split("\n")[0]


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing for a value that is logged."""
