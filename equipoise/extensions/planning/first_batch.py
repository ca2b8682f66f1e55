"""The first batch of loaders, before a run reads them: read by a copy of this process, so that nothing here changes."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch.utils.data import DataLoader

from equipoise.errors import ConfigurationError
from equipoise.extensions.planning.tracing.planned_batches import empty_loader, planned_batches
from equipoise.interop.lightning.loaders import combine

__all__ = ["read_ahead"]

_SECONDS = 60.0
# Attributes of a loader that starts no process and uses no GPU.
_IN_ONE_PROCESS = {"num_workers": 0, "timeout": 0, "pin_memory": False}


def read_ahead(open_loaders: Callable[[], Any], seconds: float = _SECONDS) -> Any:
    """Return the first batch of loaders, or that which their batch sampler names for plans, on the CPU.

    A copy of this process opens the loaders, and reads. Loaders, samplers, files and random numbers of this process
    stay as they are.

    Args:
        open_loaders: Returns a loader, or a structure of loaders. It is called in the copy.
        seconds: Time after which the copy is ended. Default: 60.

    Raises:
        ConfigurationError: If the batch cannot be read in this way.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigurationError("this system cannot copy a process")
    # 1. The copy, which writes its answer into a pipe.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(open_loaders, sender))
    with warnings.catch_warnings():
        # Python warns of threads, which a copy lacks. Loaders start their workers in the same way.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            process.start()
        except (OSError, AssertionError) as error:
            # There is no memory for it, or this process may start none.
            receiver.close()
            sender.close()
            raise ConfigurationError(f"this process cannot be copied ({error})") from error
    sender.close()

    # 2. Its answer.
    try:
        content = None
        is_in_time = receiver.poll(seconds)
        if is_in_time:
            # It may end before its answer, or within it.
            with contextlib.suppress(EOFError, OSError):
                content = receiver.recv_bytes()
    finally:
        receiver.close()
        process.kill()
        process.join()
        process.close()
    if not is_in_time:
        raise ConfigurationError(f"the first batch was not read within {seconds:.0f} seconds")
    if content is None:
        raise ConfigurationError("the process that read its first batch ahead ended without an answer")
    try:
        # It comes from a copy of this process.
        batch, reason = pickle.loads(content)  # noqa: S301
    except Exception as error:
        raise ConfigurationError(f"its first batch cannot be sent ({type(error).__name__}: {error})") from error
    if reason is not None:
        raise ConfigurationError(reason)
    return batch


def _answer(open_loaders: Callable[[], Any], sender: Connection) -> None:
    """Send the batch, or the reason why there is none; the body of the copy."""
    _be_silent()
    # A copy lacks the threads of torch, and would wait for them.
    torch.set_num_threads(1)
    try:
        content = pickle.dumps((_read(open_loaders()), None))
    except ConfigurationError as error:
        content = pickle.dumps((None, str(error).rstrip(".")))
    except Exception as error:
        first_line, _, _ = str(error).partition("\n")
        reason = f"its first batch cannot be read ahead ({type(error).__name__}: {first_line})"
        content = pickle.dumps((None, reason))
    sender.send_bytes(content)


def _be_silent() -> None:
    """Write nothing to the terminal, and leave Ctrl-C to the process that waits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _read(loaders: Any) -> Any:
    """Return a batch, read without further processes, and without pinned memory, for which a copy has no GPU."""
    combined, _ = combine(loaders, "max_size_cycle")
    for loader in combined.flattened:
        if isinstance(loader, DataLoader):
            for name, value in _IN_ONE_PROCESS.items():
                setattr(loader, name, value)
    if combined.iterables is combined.flattened[0]:
        batch = planned_batches(combined.flattened[0]).batches[0]
    else:
        batch, _, _ = next(iter(combined), (None, 0, 0))
        if batch is None:
            raise empty_loader()
    return move_data_to_device(batch, "cpu")
