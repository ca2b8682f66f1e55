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

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.parallel.communication.rank import slurm_job
from equipoise.trainer.runtime import slurm

if TYPE_CHECKING:
    from equipoise.trainer.trainer import Trainer

__all__ = ["leave_evaluation", "leave_training", "signals_noted", "uninterrupted"]


@contextmanager
def signals_noted(trainer: "Trainer") -> Iterator[None]:
    """Notes SIGTERM, and SIGUSR1 in a job of Slurm, upon which the loops end after the batch.

    A handler of SIGTERM that was there is called as well. One of SIGUSR1 is the program's own, and stays.
    """
    trainer.received_sigterm = False
    trainer.requeues = False
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int) -> None:
        trainer.requeues = trainer.requeues or number != signal.SIGTERM
        trainer.received_sigterm = True

    # SIGUSR1 shows what a process of ours hangs in, so the program that has started it hands on another signal.
    requeue = signal.SIGUSR2 if trainer.connected_strategy.processes.spawns else signal.SIGUSR1
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


def leave_training(trainer: "Trainer") -> None:
    """Ends the run after a training batch, as soon as all processes end after the same one.

    Raises:
        SIGTERMException: If the run ends here.
    """
    batches = trainer.progress.batch.total.ready
    if trainer.connected_strategy.processes.ends_after(batches, trainer.accumulate_grad_batches):
        _leave(trainer)


def leave_evaluation(trainer: "Trainer") -> None:
    """Ends the run after a batch of an evaluation; within a fit of several processes the next training batch does.

    Raises:
        SIGTERMException: If the run ends here.
    """
    if trainer.state.fn != TrainerFn.FITTING or trainer.world_size == 1:
        _leave(trainer)


def _leave(trainer: "Trainer") -> None:
    if slurm_job() is None or trainer.state.fn != TrainerFn.FITTING:
        raise SIGTERMException
    if not trainer.sanity_checking:  # before it nothing was learned
        path = slurm.checkpoint_path(trainer)
        trainer.save_checkpoint(path)
        rank_zero_info(f"Slurm asked this job to end: its state is saved in {path}.")
    if not trainer.requeues:
        raise SIGTERMException
    if trainer.is_global_zero:
        slurm.requeue()
    trainer.connected_strategy.processes.barrier("requeue")  # the end of one task may end the others
    raise SIGTERMException(os.EX_TEMPFAIL)
