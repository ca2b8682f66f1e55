"""Threads in which the members' steps run until they call a network, and continue with its output.

Only one of them runs at a time: the caller waits until a step pauses or ends. A thread lasts as long as a run.
"""

import threading
from collections.abc import Callable
from typing import Any

from equipoise.parallel.replicas.device_threads import ThreadState

__all__ = ["MemberThread"]


class _Abandoned(BaseException):
    """Ends a step that will not continue. No `except Exception` of the user's catches it."""


class MemberThread:
    """A thread that runs the steps of one member.

    Args:
        member: The index of the member.

    Attributes:
        member: The index.
        call: The name of the network that the step calls, with its arguments; None while it does not wait.
        is_busy: True from the start of a step to its end.
    """

    def __init__(self, member: int) -> None:
        self.member = member
        self.call: Any = None
        self.is_busy = False
        self._function: Callable[[], Any] | None = None
        self._state: ThreadState | None = None
        self._reply: Any = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        # Locks, which are quicker than semaphores: each is released by one thread and acquired by the other.
        self._step_turn = threading.Lock()
        self._caller_turn = threading.Lock()
        self._step_turn.acquire()
        self._caller_turn.acquire()
        self._thread = threading.Thread(target=self._run, name=f"equipoise-member-{member}", daemon=True)
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
        self._function = function
        self._state = state
        self.is_busy = True
        self._switch()

    def resume(self, reply: Any) -> None:
        """Let the step continue to its next call, or to its end.

        Args:
            reply: The result of `pause`.

        Raises:
            BaseException: The error of the step.
        """
        self._reply = reply
        self._switch()

    def take_result(self) -> Any:
        """Return what the step returned, and refer to it no more."""
        result = self._result
        self._result = None
        return result

    def abandon(self) -> None:
        """End the present step where it waits."""
        if self.is_busy:
            self._is_abandoned = True
            self._step_turn.release()
            self._caller_turn.acquire()
            self._is_abandoned = False
            self._error = None

    def close(self) -> None:
        """End the thread."""
        self.abandon()
        self._function = None
        self._step_turn.release()
        self._thread.join()

    def _switch(self) -> None:
        """Let the thread run until it waits again, and raise the error of its step."""
        self.call = None
        self._step_turn.release()
        self._caller_turn.acquire()
        if self._error is not None:
            error = self._error
            self._error = None
            try:
                raise error
            finally:
                # Its traceback refers to this frame.
                del error

    # For the thread.

    def pause(self, call: Any) -> Any:
        """Wait with a call of a network, and return the reply of `resume`.

        Args:
            call: The name of the network and the arguments.
        """
        self.call = call
        self._caller_turn.release()
        self._step_turn.acquire()
        if self._is_abandoned:
            raise _Abandoned
        reply = self._reply
        self._reply = None
        return reply

    def _run(self) -> None:
        """Run one step after the other."""
        while True:
            self._step_turn.acquire()
            function = self._function
            if function is None:
                return
            try:
                assert self._state is not None
                with self._state.entered():
                    self._result = function()
            except _Abandoned:
                pass
            except BaseException as error:
                # The caller raises it.
                self._error = error
            self._function = None
            del function
            self.is_busy = False
            self._caller_turn.release()
