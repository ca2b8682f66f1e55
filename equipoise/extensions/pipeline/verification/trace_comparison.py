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
from typing import Any, NamedTuple

from torch import fx, nn

from equipoise.extensions.pipeline.forward.layer_lending import is_of_torch
from equipoise.extensions.pipeline.forward.user_lines import line_of_user
from equipoise.extensions.pipeline.graph.call_structure import NetworkCall
from equipoise.extensions.pipeline.graph.traced import CallInterpreter, Traced
from equipoise.extensions.pipeline.verification.output_comparison import Output, fingerprints_of
from equipoise.memory.out_of_memory import is_out_of_memory

__all__ = ["Comparison", "Parting"]

# Receives a call and its value.
OnValue = Callable[[fx.Node, Any], None]
# Stands for the value of a call that failed.
_NO_VALUE = "no value"


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
        call: The call.

    Attributes:
        is_possible: False if the forward differs from itself when it is repeated: then nothing can be compared with
            it.
    """

    def __init__(self, call: NetworkCall) -> None:
        self.is_possible = True
        self._call = call
        # Torch's encoder is traced by another forward, which computes the same values with another graph.
        has_encoder = any(isinstance(submodule, nn.TransformerEncoder) for submodule in call.network.modules())
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
        expected, error = self._outcome(self._call.compute)
        output, error_of_trace = self._outcome(partial(self._run_traced, traced))
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
        repeated, error = self._outcome(self._call.compute)
        self.is_possible = error is None and repeated is not None and repeated.agrees(expected)
        if not self.is_possible:
            return None
        return self._locate(traced, None)

    # Computation.

    def _outcome(self, compute: Callable[[], Any]) -> tuple[Output | None, Exception | None]:
        """Compute from the same state every time, and return the output or the error."""

        def output() -> Output:
            return Output(compute(), with_graph=self._compares_graphs)

        try:
            return self._call.rehearsed(output), None
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None, error

    def _run_traced(self, traced: Traced, on_value: OnValue | None = None) -> Any:
        calls = _WatchedCalls(traced.root, traced.graph, self._call.device)
        calls.on_value = on_value
        tensors = tuple(self._call.copied_tensors())
        return traced.output.fill(calls.run(tensors))

    # The first difference.

    def _locate(self, traced: Traced, error: Exception | None) -> Parting:
        """Compute both once more, and find the first value of the trace that the forward does not compute."""
        module_ids = {id(module) for module in self._call.network.modules()}
        operations: list[_Computation] = []
        calls: list[_Computation] = []

        def on_operation(name: str, result: Any, args: Any) -> None:
            frame = currentframe()
            line = line_of_user(frame, NetworkCall.compute.__code__)
            owners = _owners_of_frame(frame, module_ids)
            operations.append(_Computation(fingerprints_of(result), line, owners))

        def on_value(node: fx.Node, value: Any) -> None:
            fingerprints = []
            # The forward has no operation for a tensor that it looks up.
            if node.op != "get_attr":
                fingerprints = fingerprints_of(value)
            calls.append(_computation_of(node, fingerprints, traced))

        # 1. Compute both, and note all values. The trace may fail at a call, whose value the forward does not compute.
        self._outcome(partial(self._call.compute, on_operation))
        self._outcome(partial(self._run_traced, traced, on_value))
        calls += [_computation_of(node, [_NO_VALUE], traced) for node in traced.calls[len(calls) :]]

        # 2. Find the call and the operation with which they continue.
        call, operation = self._first_difference(operations, calls)

        # 3. Leave out the network itself and torch's layers: only the user's submodules can stay whole.
        users_modules = []
        for module in (*call.owners, *operation.owners):
            if module is not self._call.network and not is_of_torch(module):
                users_modules.append(module)
        return Parting(operation.line, call.line, error, users_modules)

    def _first_difference(
        self, operations: "Sequence[_Computation]", calls: "Sequence[_Computation]"
    ) -> "tuple[_Computation, _Computation]":
        """Return the first call whose value the forward does not compute, and the next operation of the forward."""
        # Look for each new value of the trace among the operations after the last match.
        visited = set(fingerprints_of(self._call.structure.tensors))
        remaining = [*operations, _NOTHING]
        for call in calls:
            for fingerprint in call.fingerprints:
                if fingerprint in visited:
                    continue
                visited.add(fingerprint)
                matches = (index for index, operation in enumerate(remaining) if fingerprint in operation.fingerprints)
                match = next(matches, None)
                if match is None:
                    return call, remaining[0]
                del remaining[: match + 1]
        return _NOTHING, remaining[0]


class _Computation(NamedTuple):
    """An operation of a forward, or a call of its trace.

    Attributes:
        fingerprints: Fingerprints of its values.
        line: The user's line from which it comes; empty if unknown.
        owners: Modules in whose forward it is, the innermost first.
    """

    fingerprints: Sequence[Any]
    line: str
    owners: Sequence[nn.Module]


# Follows the last computation.
_NOTHING = _Computation((), "", ())


class _WatchedCalls(CallInterpreter):
    """Run the calls of a trace, and report their values.

    Attributes:
        on_value: Receives each call and its value. None: nothing is reported.
    """

    on_value: OnValue | None = None

    def run_node(self, node: fx.Node) -> Any:
        """Return the value of a call."""
        value = super().run_node(node)
        if self.on_value is not None and node.op not in ("placeholder", "output"):
            self.on_value(node, value)
        return value


def _owners_of_frame(frame: FrameType | None, module_ids: set[int]) -> list[nn.Module]:
    """Return the modules in whose methods a frame is, the innermost first."""
    owners = []
    while frame is not None and frame.f_code is not NetworkCall.compute.__code__:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in module_ids:
            owners.append(owner)
        frame = frame.f_back
    return owners


def _computation_of(node: fx.Node, fingerprints: Sequence[Any], traced: Traced) -> _Computation:
    """Return a call of a trace, with the modules in whose forwards it was traced."""
    module_stack = node.meta.get("nn_module_stack", {})
    # A layer that is called is no owner of the call.
    owners = [traced.root.get_submodule(path) for path in reversed(module_stack) if path != node.target]
    return _Computation(fingerprints, node.meta.get("line", ""), owners)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
