"""Functions in processes of their own, which a signal may end at any moment."""

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from lightning.pytorch import Callback

__all__ = ["KillInStep", "attempt"]


def attempt(run: Callable[[], None], folder: Path, limit: float) -> bool:
    """Runs a function in a process of its own, which shares what is imported here.

    Args:
        run: The function.
        folder: Where its error goes.
        limit: Seconds.

    Returns:
        Whether it came to its end; False if it, or a process that it started, was killed.

    Raises:
        AssertionError: If it failed, or took too long.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _in_child(run, folder, limit)
    try:
        status = _wait(child, limit)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # workers that have not noticed yet that they are alone
    error = folder / "error.txt"
    if error.exists():
        text = error.read_text()
        error.unlink()
        if "SIGKILL" in text or "signal 9" in text:  # a process of the run was killed, and the run says so
            return False
        raise AssertionError(text)
    return not os.WIFSIGNALED(status)


def _in_child(run: Callable[[], None], folder: Path, limit: float) -> None:
    """Runs a function and ends this process."""
    os.setsid()
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(limit - 5, exit=False, file=output)
    code = 0
    try:
        run()
    except BaseException:
        sys.setprofile(None)
        (folder / "error.txt").write_text(traceback.format_exc())
        code = 1
    finally:
        os._exit(code)


def _wait(child: int, limit: float) -> int:
    """The exit status of a process.

    Raises:
        AssertionError: If it takes too long.
    """
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"it did not end within {limit:.0f} s")


class KillInStep(Callback):
    """Kills a process at a random call of a Python function, in a step or behind it.

    Args:
        step: The number of the step in the run; None: never.
        calls: The number of the call, counted from the beginning of that step.
        rank: The process that counts.
        victim: The process that is killed; None: the one that counts.
        with_children: Whether all processes that the victim has started, and their children, are killed, too.
    """

    def __init__(
        self,
        step: int | None,
        calls: int = 0,
        rank: int = 0,
        victim: int | None = None,
        *,
        with_children: bool = False,
    ) -> None:
        self.step = step
        self.calls = calls
        self.rank = rank
        self.victim = victim
        self.with_children = with_children
        self.is_counting = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begins to count."""
        if self.step is None or self.is_counting or trainer.global_rank != self.rank:
            return
        if trainer.current_epoch * trainer.num_training_batches + batch_idx >= self.step:
            self.is_counting = True
            sys.setprofile(self._count)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Ends counting."""
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if event != "call":
            return
        self.calls -= 1
        if self.calls < 0:
            sys.setprofile(None)
            victim = psutil.Process(self.victim)
            others = victim.children(recursive=True) if self.with_children else []
            # This process last.
            for process in sorted((victim, *others), key=lambda process: process.pid == os.getpid()):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if self.victim is not None:
                signal.pause()  # the processes of a run whose caller is gone are to end by themselves
