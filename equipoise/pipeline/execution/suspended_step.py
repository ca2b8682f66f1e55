"""A user's step that stops where it calls the network, and continues when the output is there.

Each step runs in a thread of its own, but never beside another: whoever starts or resumes it waits until it has come to
the network's call, or to its end. So an unmodified `training_step` runs once, and a pipeline computes what it asks for.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from equipoise.errors import StepError
from equipoise.parallel.replicas.device_threads import ThreadState

__all__ = ["SuspendedStep", "current_step", "inside_stage", "is_inside_stage"]

_local = threading.local()


class _Abandoned(BaseException):
    """Unwinds a step that nobody will go on with; no error of the user's, so no `except Exception` may stop it."""


def current_step() -> "SuspendedStep | None":
    """The step that runs in this thread."""
    return getattr(_local, "step", None)


@contextmanager
def inside_stage() -> Iterator[None]:
    """While a stage computes in this thread: what it calls is what it has to compute, and nobody's call to catch."""
    outer, _local.stage = is_inside_stage(), True
    try:
        yield
    finally:
        _local.stage = outer


def is_inside_stage() -> bool:
    """Whether a stage computes in this thread."""
    return bool(getattr(_local, "stage", False))


class SuspendedStep:
    """A step.

    Args:
        function: The step; calls the network at most once.

    Attributes:
        call: The arguments with which it has called the network; None if it has not.
        state: What torch keeps for the thread at that moment.
        inside: The name of the module whose call was caught; None before.
        result: What the function returned, once it has ended.
        ended: Whether it has.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._output: Any = None
        self._abandoned = False
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.state: ThreadState | None = None
        self.inside: str | None = None
        self.result: Any = None
        self.ended = False

    def start(self) -> None:
        """Runs to the network's call, or to the end.

        Raises:
            BaseException: What the function raised.
        """
        state = ThreadState.capture(("cpu", "cuda"))
        self._thread = threading.Thread(target=self._run, args=(state,), name="equipoise-micro-batch", daemon=True)
        self._thread.start()
        self._wait()

    def resume(self, output: Any) -> None:
        """Goes on to the end with what the network returned.

        Raises:
            BaseException: What the function raised.
        """
        self._output = output
        self._turn.release()
        del output
        self._wait()

    def abandon(self) -> None:
        """Ends it without going on; may be called at any time."""
        if self._thread is not None and self._thread.is_alive():
            self._abandoned = True
            self._turn.release()
            self._thread.join()

    def hand_over(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in its thread in the place of the network's forward.

        Raises:
            StepError: If it is called a second time.
        """
        if self.call is not None:
            raise StepError(
                "`training_step` calls the network twice, but a pipeline computes it once for each micro-batch. Call it"
                " once with both inputs together (`torch.cat`), or train on one device or with `dp`."
            )
        self.call, self.state = (args, kwargs), ThreadState.capture(("cpu", "cuda"))
        self._back.release()
        self._turn.acquire()
        if self._abandoned:
            raise _Abandoned
        output, self._output = self._output, None
        return output

    def _run(self, state: ThreadState) -> None:
        _local.step = self
        try:
            with state.entered():
                self.result = self._function()
        except _Abandoned:
            pass
        except BaseException as error:  # is raised again where somebody waits
            self._error = error
        finally:
            _local.step = None
            self.ended = True
            self._back.release()

    def _wait(self) -> None:
        self._back.acquire()
        if self.ended and self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error
