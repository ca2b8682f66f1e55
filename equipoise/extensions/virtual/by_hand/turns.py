"""Parts of a process that run in turn: one of them at a time, each to its next call that all parts make."""

from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple

from equipoise.extensions.common.step_thread import StepThread
from equipoise.extensions.virtual.by_hand.part_view import PartView
from equipoise.extensions.virtual.by_hand.shared_state import SharedState
from equipoise.parallel.replicas.device_threads import ThreadState

__all__ = ["Call", "Turns"]


class Call(NamedTuple):
    """A call that all parts make together.

    Attributes:
        label: Its description, as the predicate of a sentence; the same in all parts.
        act: Function that does once what all parts have called; it receives the forms of gradients of all processes.
    """

    label: str
    act: Callable[[list[Any]], Any]


class _Abandoned(BaseException):
    """Ends the first part where another one failed. No `except Exception` of the user's catches it."""


class Turns:
    """Runs the first part of a step in this thread and each other one in a thread of its own, while all others wait.

    Args:
        threads: A thread for each part but the first.
        views: The state that each part sees at its beginning.
        shared: The state that parts have in common after a call.
        meeting: Function that makes a call once all parts wait. It receives the call of each part, None if the part has
            ended, and returns the result.

    Attributes:
        running: The index of the part that runs.
        shared: The state that parts have in common after a call.
        is_acting: True while something is done for all parts.
    """

    def __init__(
        self,
        threads: Sequence[StepThread],
        views: Sequence[PartView],
        shared: SharedState,
        meeting: Callable[[Sequence[Call | None]], Any],
    ) -> None:
        self.running = 0
        self.is_acting = False
        self._threads = threads
        self._views = views
        self.shared = shared
        self._meeting = meeting
        # The result of the last call, and the error that ends the step.
        self._reply: Any = None
        self._error: BaseException | None = None

    def run(self, steps: Sequence[Callable[[], Any]]) -> None:
        """Run the steps of parts to their ends.

        Raises:
            BaseException: The error of a part, or of a meeting. All parts have ended by then.
        """
        state = ThreadState.capture(("cpu", "cuda"))
        try:
            for thread, step in zip(self._threads, steps[1:], strict=True):
                # Threads begin in the context of this one.
                thread.start(partial(copy_context().run, _wait_and_run, thread, step), state)
            self._views[0].enter()
            self._views[0].check()
            steps[0]()
            self._meet(None)
        except _Abandoned:
            pass
        finally:
            for thread in self._threads:
                thread.abandon()
        # The first part may have caught what ended it.
        if self._error is not None:
            try:
                raise self._error
            finally:
                # Its traceback refers to this frame.
                self._error = None

    def meet(self, call: Call) -> Any:
        """Wait until all parts have made a call, and return its result.

        Args:
            call: The call of the part that runs.
        """
        if self.running:
            return self._threads[self.running - 1].pause(call)
        return self._meet(call)

    def _meet(self, call: Call | None) -> Any:
        """Let all other parts run to their next calls; then make it."""
        if self._error is not None:
            raise _Abandoned
        first = self._views[0]
        try:
            first.leave()
            calls = [call]
            for index in range(1, len(self._views)):
                self.running = index
                calls.append(self._next_call_of(index))
            self.running = 0
            first.enter()
            self.is_acting = True
            self._reply = self._meeting(calls)
            self.shared.share()
            # The call may have drawn numbers, but not those of the part.
            first.numbers.restore()
            first.check()
        except BaseException as error:
            self._error = error
            raise _Abandoned from None
        finally:
            self.running = 0
            self.is_acting = False
        return self._reply

    def _next_call_of(self, index: int) -> Call | None:
        """Let a part run until it waits again."""
        view = self._views[index]
        view.enter()
        self.shared.give()
        view.check()
        thread = self._threads[index - 1]
        thread.resume(self._reply)
        view.leave()
        call: Call | None = thread.call
        return call


def _wait_and_run(thread: StepThread, step: Callable[[], Any]) -> None:
    thread.pause("its turn")
    step()
