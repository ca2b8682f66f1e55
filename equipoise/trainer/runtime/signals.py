"""Signals that end a run after its batch: SIGTERM, and SIGUSR1 of Slurm; Ctrl-C waits while a run ends.

A handler only notes its signal. The loops ask after each batch, and end the run in order: in a job of Slurm they save a
checkpoint first, and after SIGUSR1 they put the job back into the queue.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.communication.rank import slurm_job
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.state.run_state import RunState

__all__ = ["EndOnSignal", "signals_noted", "uninterrupted"]


@contextmanager
def signals_noted(state: RunState, processes: Processes) -> Iterator[None]:
    """Note SIGTERM, and SIGUSR1 in a job of Slurm, upon which the loops end after the batch.

    A handler of SIGTERM that was there is called as well. One of SIGUSR1 is the program's own, and stays.
    """
    state.forget_signals()
    # Python allows handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int) -> None:
        state.note_signal(requeues=number != signal.SIGTERM)

    with ExitStack() as handlers:
        handlers.enter_context(_noted(signal.SIGTERM, note))
        if slurm_job() is not None and state.requeues_on_signal:
            # In a process that the strategy has started, SIGUSR1 prints the stack: its parent forwards SIGUSR2 instead.
            requeue_signal = signal.SIGUSR1
            if processes.spawns:
                requeue_signal = signal.SIGUSR2
            if not callable(signal.getsignal(requeue_signal)):
                handlers.enter_context(_noted(requeue_signal, note))
        yield


@contextmanager
def _noted(number: int, note: Callable[[int], None]) -> Iterator[None]:
    """Note a signal; an earlier handler is called as well, and restored at the end."""
    before = signal.getsignal(number)

    def handle(received: int, frame: Any) -> None:
        note(received)
        if callable(before):
            before(received, frame)

    signal.signal(number, handle)
    try:
        yield
    finally:
        # None: a handler that was not installed from Python.
        if before is None:
            before = signal.SIG_DFL
        signal.signal(number, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore a second Ctrl-C while everything is being released."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Callable[..., Any] | int | None = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        # None: a handler that was not installed from Python.
        if before is None:
            before = signal.default_int_handler
        signal.signal(signal.SIGINT, before)


# How a run ends.


class EndOnSignal:
    """Ends a run after a batch, once a signal came.

    Args:
        state: The settings, stage and counters.
        strategy: The strategy.
        save_checkpoint: The trainer's method, called with a path.
    """

    def __init__(
        self, state: RunState, strategy: Strategy, save_checkpoint: Callable[[str | os.PathLike[str]], None]
    ) -> None:
        self._state = state
        self._strategy = strategy
        self._save_checkpoint = save_checkpoint

    def in_training(self) -> None:
        """End the run after a training batch, as soon as all processes end after the same one.

        Raises:
            SIGTERMException: If the run ends here.
        """
        batches = self._state.progress.batch.total.ready
        if self._strategy.processes.ends_after(batches, self._state.accumulate_grad_batches):
            self._end()

    def in_evaluation(self) -> None:
        """End the run after a batch of an evaluation; within a fit of several processes the next training batch does.

        Raises:
            SIGTERMException: If the run ends here.
        """
        if not self._state.fitting or self._strategy.processes.world_size == 1:
            self._end()

    def _end(self) -> None:
        state = self._state
        if slurm_job() is None or not state.fitting:
            raise SIGTERMException
        from equipoise.trainer.runtime.slurm import checkpoint_path, requeue

        # Before the sanity check has ended, there is nothing to save.
        if not state.sanity_checking:
            path = checkpoint_path(state)
            self._save_checkpoint(path)
            folders = self._strategy.portable.folders
            if folders is not None:
                folders.finish()
            rank_zero_info(f"Slurm asked this job to end: its state is saved in {path}.")
        if not state.requeues:
            raise SIGTERMException
        processes = self._strategy.processes
        if processes.is_main:
            requeue()
        # The end of one task may end the others.
        processes.barrier("requeue")
        raise SIGTERMException(os.EX_TEMPFAIL)
