"""A user's step that stops where it calls the network, and continues with the output.

Each step runs in a thread of its own, but only while the caller that starts or resumes it waits: until it pauses, as at
the network's call, or until its end. So an unmodified `training_step` runs once, and the pipeline computes its call.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from equipoise.errors import StepError
from equipoise.parallel.device_work import in_helper_thread
from equipoise.parallel.replicas.device_threads import ThreadState

__all__ = ["SuspendedStep", "current_step", "inside_stage", "is_inside_stage"]


class _LocalState(threading.local):
    """State of each thread."""

    step: "SuspendedStep | None" = None
    is_inside_stage: bool = False

    def set_step(self, step: "SuspendedStep | None") -> None:
        self.step = step

    @contextmanager
    def inside_stage(self) -> Iterator[None]:
        outer = self.is_inside_stage
        self.is_inside_stage = True
        try:
            yield
        finally:
            self.is_inside_stage = outer


_local = _LocalState()


class _Abandoned(BaseException):
    """Ends the thread of a step that will not continue. No `except Exception` of the user's catches it."""


def current_step() -> "SuspendedStep | None":
    """Return the step that runs in this thread; None if there is none."""
    return _local.step


def inside_stage() -> AbstractContextManager[None]:
    """Return a context in which a stage computes in this thread, so that calls of the network are not intercepted."""
    return _local.inside_stage()


def is_inside_stage() -> bool:
    """Return True if a stage computes in this thread."""
    return _local.is_inside_stage


class SuspendedStep:
    """A step in a thread of its own.

    Args:
        function: The step, which calls the network at most once.

    Attributes:
        call: Arguments of its call of the network; None before the call.
        state: State that torch keeps for the thread at the call; None before.
        inside: Name of the module that was called; None before the call.
        result: Result of the function; None before its end.
        ended: True after the function has ended.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        # Released to let the step run, and to let its caller continue.
        self._step_turn = threading.Semaphore(0)
        self._caller_turn = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._output: Any = None
        self._is_abandoned = False
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.state: ThreadState | None = None
        self.inside: str | None = None
        self.result: Any = None
        self.ended = False

    def start(self) -> None:
        """Run to the network's call, or to the end.

        Raises:
            BaseException: Error of the function.
        """
        # The new thread begins with torch's defaults.
        state = ThreadState.capture(("cpu", "cuda"))
        self._thread = threading.Thread(
            target=self._run,
            args=(state,),
            name="equipoise-micro-batch",
            daemon=True,
        )
        self._thread.start()
        self._wait()

    def resume(self, output: Any) -> None:
        """Continue to the next pause, or to the end.

        Args:
            output: The network's output; the result of the pause.

        Raises:
            BaseException: Error of the function.
        """
        self._output = output
        self._step_turn.release()
        # The step alone refers to the output from here on.
        del output
        self._wait()

    def take_result(self) -> Any:
        """Return what the function returned, and refer to it no more."""
        result = self.result
        self.result = None
        return result

    def abandon(self) -> None:
        """End the thread without continuing the step. May be called at any time."""
        if self._thread is not None and self._thread.is_alive():
            self._is_abandoned = True
            self._step_turn.release()
            self._thread.join()

    def suspend(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stop until `resume`, and return the network's output. The step's thread calls this in place of the network.

        Args:
            name: Name of the module that is called.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Raises:
            StepError: If the step calls the network a second time.
        """
        if self.call is not None:
            raise StepError(
                "`training_step` calls the network twice, but a pipeline computes it once for each micro-batch. Call it"
                " once with both inputs together (`torch.cat`), or train on one device or with `dp`."
            )
        self.inside = name
        self.call = (args, kwargs)
        self.state = ThreadState.capture(("cpu", "cuda"))
        return self.pause()

    def pause(self) -> Any:
        """Stop until `resume`, and return its argument. Called in the step's thread."""
        self._caller_turn.release()
        self._step_turn.acquire()
        if self._is_abandoned:
            raise _Abandoned
        output = self._output
        self._output = None
        return output

    def _run(self, state: ThreadState) -> None:
        _local.set_step(self)
        try:
            with state.entered(), in_helper_thread():
                self.result = self._function()
        except _Abandoned:
            pass
        except BaseException as error:
            # `_wait` raises it in the caller's thread.
            self._error = error
        finally:
            _local.set_step(None)
            self.ended = True
            self._caller_turn.release()

    def _wait(self) -> None:
        """Wait until the step stops or ends, and raise its error."""
        self._caller_turn.acquire()
        if self.ended and self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error = self._error
            self._error = None
            try:
                raise error
            finally:
                # Its traceback refers to this frame.
                del error
