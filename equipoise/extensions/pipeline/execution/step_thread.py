"""Threads in which steps run until they call a network, and continue with its output.

A thread runs only while the caller waits: until its step pauses or ends.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from equipoise.parallel.replicas.device_threads import ThreadState

__all__ = ["StepThread"]

# The reply to a call of a step that will not continue, and the message that ends a thread.
_ABANDON: Any = object()
_END: Any = object()


class _Abandoned(BaseException):
    """Ends a step that will not continue. No `except Exception` of the user's catches it."""


class StepThread:
    """A thread that runs steps, one after the other.

    Args:
        name: Its name.

    Attributes:
        call: The call of a network with which the step waits; None while it does not wait.
    """

    def __init__(self, name: str) -> None:
        self.call: Any = None
        self._result: Any = None
        # True while no step runs in the thread; an interrupt of the caller does not change that.
        self._is_idle = threading.Event()
        self._is_idle.set()
        # The thread receives a step, or the reply to its call. It sends a call, or the result or error of the step.
        self._received: SimpleQueue[Any] = SimpleQueue()
        self._sent: SimpleQueue[tuple[Any, Any, BaseException | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int:
        """The number of the thread."""
        assert self._thread.ident is not None
        return self._thread.ident

    # For the caller.

    def start(self, function: Callable[[], Any], state: ThreadState) -> None:
        """Run a step to its first call of a network, or to its end.

        Args:
            function: The step.
            state: State of torch in which it runs.

        Raises:
            BaseException: The error of the step.
        """
        self._switch((function, state))

    def resume(self, reply: Any) -> None:
        """Let the step continue to its next call, or to its end.

        Args:
            reply: The result of `pause`.

        Raises:
            BaseException: The error of the step.
        """
        self._switch(reply)

    def take_result(self) -> Any:
        """Return the result of the step, and release it."""
        result = self._result
        self._result = None
        return result

    def abandon(self) -> None:
        """End the present step where it waits, or at its next call if an interrupt has found it running."""
        if self._is_idle.is_set():
            return
        self._received.put(_ABANDON)
        self._is_idle.wait()
        # What it sent meanwhile is of no use.
        while not self._sent.empty():
            self._sent.get()
        self.call = None

    def close(self) -> None:
        """End the thread, and a step that waits. A step that runs, after an interrupt of the caller, ends first."""
        self._received.put(_ABANDON)
        self._received.put(_END)
        self._thread.join()

    def _switch(self, message: Any) -> None:
        """Let the thread run until it waits again, and raise the error of its step."""
        self._received.put(message)
        self.call, self._result, error = self._sent.get()
        if error is not None:
            try:
                raise error
            finally:
                # Its traceback refers to this frame.
                del error

    # For the thread.

    def pause(self, call: Any) -> Any:
        """Wait with a call of a network, and return the reply of `resume`.

        Args:
            call: A description of it for the caller, such as its arguments; not None.
        """
        self._sent.put((call, None, None))
        reply = self._received.get()
        if reply is _ABANDON:
            raise _Abandoned
        return reply

    def _run(self) -> None:
        """Run one step after the other."""
        while (message := self._received.get()) is not _END:
            if message is _ABANDON:
                # The step has ended without another call.
                continue
            self._is_idle.clear()
            function, state = message
            result = None
            error: BaseException | None = None
            try:
                with state.entered():
                    result = function()
            except _Abandoned:
                pass
            except BaseException as caught:
                # The caller raises it.
                error = caught
            del message, function
            self._sent.put((None, result, error))
            self._is_idle.set()
            del result, error
