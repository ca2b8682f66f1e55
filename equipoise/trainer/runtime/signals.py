"""Signals during a run: SIGTERM, SIGUSR1 of Slurm, and a second Ctrl-C.

A handler only notes its signal. The loops ask after each batch, and end the run in order: in a job of Slurm they save a
checkpoint first, and after SIGUSR1 they put the job back into the queue.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.parallel.communication.rank import slurm_job
from equipoise.trainer.runtime import slurm

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["leave_evaluation", "leave_training", "signals_noted", "uninterrupted"]


@contextmanager
def signals_noted(context: "RunContext") -> Iterator[None]:
    """Notes SIGTERM, and SIGUSR1 in a job of Slurm, upon which the loops end after the batch.

    A handler of SIGTERM that was there is called as well. One of SIGUSR1 is the program's own, and stays.
    """
    state = context.state
    state.received_sigterm = False
    state.requeues = False
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int) -> None:
        state.requeues = state.requeues or number != signal.SIGTERM
        state.received_sigterm = True

    # SIGUSR1 shows what a process of ours hangs in, so the program that has started it hands on another signal.
    requeue = signal.SIGUSR2 if context.strategy.processes.spawns else signal.SIGUSR1
    with ExitStack() as handlers:
        handlers.enter_context(_noted(signal.SIGTERM, note))
        if slurm_job() is not None and not callable(signal.getsignal(requeue)):
            handlers.enter_context(_noted(requeue, note))
        yield


@contextmanager
def _noted(number: int, note: Callable[[int], None]) -> Iterator[None]:
    """Notes a signal; a handler that was there is called, and restored."""
    before = signal.getsignal(number)

    def handle(received: int, frame: Any) -> None:
        note(received)
        if callable(before):
            before(received, frame)

    signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before if before is not None else signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Lets an impatient second Ctrl-C pass while everything is being released."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Callable[..., Any] | int | None = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)


# How a run ends.


def leave_training(context: "RunContext") -> None:
    """End the run after a training batch, as soon as all processes end after the same one.

    Raises:
        SIGTERMException: If the run ends here.
    """
    state = context.state
    batches = state.progress.batch.total.ready
    if context.strategy.processes.ends_after(batches, state.accumulate_grad_batches):
        _leave(context)


def leave_evaluation(context: "RunContext") -> None:
    """End the run after a batch of an evaluation; within a fit of several processes the next training batch does.

    Raises:
        SIGTERMException: If the run ends here.
    """
    if not context.state.fitting or context.strategy.processes.world_size == 1:
        _leave(context)


def _leave(context: "RunContext") -> None:
    state = context.state
    if slurm_job() is None or not state.fitting:
        raise SIGTERMException
    # Before the sanity check has ended, there is nothing to save.
    if not state.sanity_checking:
        path = slurm.checkpoint_path(state)
        context.save_checkpoint(path)
        rank_zero_info(f"Slurm asked this job to end: its state is saved in {path}.")
    if not state.requeues:
        raise SIGTERMException
    if context.strategy.processes.is_main:
        slurm.requeue()
    # The end of one task may end the others.
    context.strategy.processes.barrier("requeue")
    raise SIGTERMException(os.EX_TEMPFAIL)
