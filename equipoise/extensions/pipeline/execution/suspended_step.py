"""A user's step that stops where it calls the network, and continues with the output.

Each step runs in a thread of its own, but only while the caller that starts or resumes it waits: until it pauses, as at
the network's call, or until its end. So an unmodified `training_step` runs once, and the pipeline computes its call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import get_gradient_edge

from equipoise.errors import StepError
from equipoise.extensions.pipeline.execution.step_thread import StepThread
from equipoise.extensions.pipeline.interop.transforms import is_transformed
from equipoise.parallel.device_work import in_helper_thread
from equipoise.parallel.replicas.device_threads import ThreadState
from equipoise.tree import tensors_in

__all__ = ["SuspendedStep", "current_step", "inside_stage", "is_inside_stage"]


# The step that runs in a thread, and whether a stage computes there. A new thread begins with the defaults.
_step: ContextVar["SuspendedStep | None"] = ContextVar("step", default=None)
_is_inside_stage = ContextVar("is_inside_stage", default=False)
# Passed by `pause`, whose thread needs a value other than None. The call itself is in `SuspendedStep.call`.
_PAUSED = object()


def current_step() -> "SuspendedStep | None":
    """Return the step that runs in this thread; None if there is none."""
    return _step.get()


@contextmanager
def inside_stage() -> Iterator[None]:
    """Let a stage compute in this thread within the context, so that calls of the network are not intercepted."""
    token = _is_inside_stage.set(True)
    try:
        yield
    finally:
        _is_inside_stage.reset(token)


def is_inside_stage() -> bool:
    """Return True if a stage computes in this thread."""
    return _is_inside_stage.get()


class SuspendedStep:
    """A step in a thread of its own.

    Args:
        function: The step, which calls the network at most once.

    Attributes:
        call: Arguments of its call of the network; None before the call.
        state: State that torch keeps for the thread at the call; None before.
        module_name: Name of the module that was called; None before the call.
        network_ends: Nodes of the graph at the network's output, while the step runs after its call.
        result: Result of the function; None before its end.
        ended: True after the function has ended.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._thread: StepThread | None = None
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.state: ThreadState | None = None
        self.module_name: str | None = None
        self.network_ends: frozenset[Any] = frozenset()
        self.result: Any = None
        self.ended = False

    def start(self) -> None:
        """Run to the network's call, or to the end.

        Raises:
            BaseException: Error of the function.
        """
        # A new thread begins with torch's defaults, so it receives the state of this one.
        state = ThreadState.capture(("cpu", "cuda"))
        self._thread = StepThread("equipoise-micro-batch")
        try:
            self._thread.start(self._run, state)
        finally:
            self._close_after_end(self._thread)

    def resume(self, output: Any) -> None:
        """Continue to the next pause, or to the end.

        Args:
            output: The network's output; the result of the pause.

        Raises:
            BaseException: Error of the function.
        """
        assert self._thread is not None
        try:
            self._thread.resume(output)
        finally:
            self._close_after_end(self._thread)

    def take_result(self) -> Any:
        """Return the result of the function, and release it."""
        result = self.result
        self.result = None
        return result

    def abandon(self) -> None:
        """End the thread without continuing the step. May be called at any time."""
        if self._thread is not None and not self.ended:
            self.ended = True
            self.network_ends = frozenset()
            self._thread.close()

    def suspend(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stop until `resume`, and return the network's output. The step's thread calls this in place of the network.

        Args:
            name: Name of the module that is called.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Raises:
            StepError: If the step calls the network a second time.
        """
        duals = map(unpack_dual, tensors_in((args, kwargs)))
        if is_transformed() or any(dual.tangent is not None for dual in duals):
            raise StepError(
                "`training_step` calls the network within a transform of torch.func (vmap, grad, jacrev, jvp, ...) or"
                " with forward-mode gradients, which do not pass from stage to stage. Train on one device, or with ddp."
            )
        if self.call is not None:
            raise StepError(
                "`training_step` calls the network twice, but a pipeline computes it once for each micro-batch. Call it"
                " once with both inputs together (`torch.cat`), or train on one device or with `dp`."
            )
        self.module_name = name
        self.call = (args, kwargs)
        self.state = ThreadState.capture(("cpu", "cuda"))
        output = self.pause()
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self.network_ends = frozenset(get_gradient_edge(tensor).node for tensor in tensors)
        return output

    def pause(self) -> Any:
        """Stop until `resume`, and return its argument. Called in the step's thread."""
        assert self._thread is not None
        return self._thread.pause(_PAUSED)

    def _run(self) -> Any:
        _step.set(self)
        with in_helper_thread():
            return self._function()

    def _close_after_end(self, thread: StepThread) -> None:
        """Take the result of a function that has ended, and close its thread."""
        if thread.call is None:
            self.result = thread.take_result()
            self.abandon()
