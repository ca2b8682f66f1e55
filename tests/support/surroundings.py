"""The state of this process that a test may change in the course of its work, but not for others."""

import contextlib
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning_utilities.core.rank_zero as rank_zero_module
import psutil
import rich
import torch
import tqdm
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

__all__ = ["Surroundings", "threads_that_stay"]

_PYTESTS_OWN = "PYTEST_CURRENT_TEST"  # changes between the phases of a test
# By whichever test comes first.
_SET_BY_IMPORTS = ("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Servers of multiprocessing, whose children are examined before, and torch's compilers of kernels for a GPU.
_ENDING_WITH_US = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "_inductor/compile_worker")
_LIGHTNINGS_OWN = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "MASTER_PORT")  # set and never taken back; done here instead
_PROC = Path("/proc")
_HANDLED = (signal.SIGINT, signal.SIGTERM)
_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning", "equipoise")
_PATIENCE = 60.0  # seconds for what was told to end and is about to; passed in full only by what never ends

# A bar of tqdm starts a thread that stays as long as the process, even a bar that is not shown (`fx.Interpreter`).
tqdm.tqdm.monitor_interval = 0


class Surroundings:
    """State of the process that a test may change in the course of its work, but not for others."""

    def __init__(self) -> None:
        self.threads = set(threading.enumerate())
        self.children = _children()
        self.environment = dict(os.environ)
        self.handlers = {number: signal.getsignal(number) for number in _HANDLED}
        self.torch = _torch_modes()
        self.watches = len(_get_current_dispatch_mode_stack())
        self.levels = _levels()
        self.messages = rank_zero_module.log.name
        self.rank = getattr(rank_zero_only, "rank", 0)
        self.folder = os.getcwd()
        self.console = vars(rich.get_console())

    def complaints(self) -> Iterator[str]:
        """Yield a sentence for everything that is not as it was."""
        if alive := self._threads_left():
            yield f"threads are alive: {alive}"
        if alive := self._children_left():
            yield f"child processes are alive: {alive}"
        if changed := _differing(
            self.environment, dict(os.environ), {_PYTESTS_OWN, *_SET_BY_IMPORTS, *_LIGHTNINGS_OWN}
        ):
            yield f"environment variables have changed: {changed}"
        if changed := _differing(self.handlers, {number: signal.getsignal(number) for number in _HANDLED}):
            yield f"signal handlers have changed: {changed}"
        if changed := _differing(self.torch, _torch_modes()):
            yield f"torch has changed: {changed}"
        if (watches := len(_get_current_dispatch_mode_stack())) != self.watches:
            yield f"{watches - self.watches} watches of operations have not been stopped"
        if changed := _differing(self.levels, _levels()):
            yield f"levels of loggers have changed: {changed}"
        if (name := rank_zero_module.log.name) != self.messages:
            yield f"Lightning's messages go to the logger {name} instead of {self.messages}"
        if (rank := getattr(rank_zero_only, "rank", 0)) != self.rank:  # all but the first say and log nothing
            yield f"Lightning's rank has changed: {rank} instead of {self.rank}"
        if (folder := _folder()) != self.folder:
            yield f"the current directory has changed: {folder} instead of {self.folder}"

    def _threads_left(self) -> list[str]:
        return [thread.name for thread in threads_that_stay(self.threads)]

    def _children_left(self) -> list[str]:
        if started := _processes(pid for server in _servers() for pid in _children(server.pid)):
            _, alive = psutil.wait_procs(started, timeout=_PATIENCE)
            if alive:
                return [f"{' '.join(process.cmdline())} ({process.pid}) of a server of processes" for process in alive]
        if not _children() - self.children:
            return []
        gc.collect()  # whoever holds them may only wait to be collected
        started = [child for child in psutil.Process().children() if child.pid not in self.children]
        _, alive = psutil.wait_procs([child for child in started if not _ends_with_us(child)], timeout=_PATIENCE)
        return [" ".join(child.cmdline()) for child in alive if child.is_running()]

    def restore(self) -> None:
        """Keeps one culprit from spoiling all tests after it."""
        self.restore_environment()
        for number, handler in self.handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        _set_torch_modes(self.torch)
        while len(_get_current_dispatch_mode_stack()) > self.watches:
            _pop_mode()
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
        rank_zero_module.log = logging.getLogger(self.messages)
        vars(rank_zero_only)["rank"] = self.rank
        os.chdir(self.folder)

    def restore_environment(self) -> None:
        for name in _differing(self.environment, dict(os.environ), {_PYTESTS_OWN, *_SET_BY_IMPORTS}):
            os.environ.pop(name, None)
            if name in self.environment:
                os.environ[name] = self.environment[name]

    def restore_console(self) -> None:
        """Takes back that Lightning's bar configures the console of rich anew, by what the environment then says."""
        rich.get_console().__dict__ = self.console


def threads_that_stay(known: Collection[threading.Thread], *, daemons: bool = False) -> list[threading.Thread]:
    """Return the threads that do not end, though they are given the time.

    Some end with an object that waits to be collected; others have been told to end and are about to.

    Args:
        known: Threads that may stay.
        daemons: Daemon threads may not stay either. Default: False.
    """
    started = [thread for thread in threading.enumerate() if thread not in known and (daemons or not thread.daemon)]
    if not started:
        return []
    gc.collect()
    deadline = time.monotonic() + _PATIENCE
    for thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in started if thread.is_alive()]


def _servers() -> list[psutil.Process]:
    """Return multiprocessing's own, from which tests start others."""
    found = []
    for process in _processes(_children()):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "multiprocessing.forkserver" in " ".join(process.cmdline()):
                found.append(process)
    return found


def _processes(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the processes of these ids that have not ended."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _ends_with_us(process: psutil.Process) -> bool:
    """Return True for processes that serve this one to its end."""
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
    return any(name in command for name in _ENDING_WITH_US)


def _children(parent: int | None = None) -> set[int]:
    """Return the ids of all child processes of a process, by default of this one.

    The kernel lists them; `psutil` would read the parents of all processes of the machine, after each test.
    """
    tasks = _PROC / str(parent or os.getpid()) / "task"
    if not _PROC.is_dir():
        return {child.pid for child in psutil.Process(parent).children()}
    found: set[int] = set()
    # A thread, or the whole process, may have ended.
    with contextlib.suppress(OSError):
        for task in os.listdir(tasks):
            with contextlib.suppress(OSError):
                found.update(map(int, (tasks / task / "children").read_text().split()))
    return found


def _torch_modes() -> dict[str, Any]:
    distributed = torch.distributed
    return {
        "number of threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic algorithms warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "process group": distributed.is_available() and distributed.is_initialized(),
    }


def _set_torch_modes(modes: dict[str, Any]) -> None:
    torch.set_num_threads(modes["number of threads"])
    torch.set_default_dtype(modes["default dtype"])
    torch.set_grad_enabled(modes["grad mode"])
    torch.use_deterministic_algorithms(
        modes["deterministic algorithms"], warn_only=modes["deterministic algorithms warn only"]
    )
    torch.autograd.set_detect_anomaly(modes["anomaly mode"])
    if not modes["process group"] and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _levels() -> dict[str, int]:
    return {name: logging.getLogger(name).level for name in _LOGGERS}


def _differing(before: dict[Any, Any], after: dict[Any, Any], besides: Collection[str] = ()) -> dict[Any, str]:
    """Return what has another value now, with both values."""
    names = [name for name in {**before, **after} if name not in besides and before.get(name) != after.get(name)]
    return {name: f"{after.get(name)!r} instead of {before.get(name)!r}" for name in names}


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a folder that is gone"
