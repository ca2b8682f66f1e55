"""Actions that all processes take if one of them has a reason: end after the same batch, or save.

After a signal:

    rank 0                                    every rank, after each batch since its signal
    all ranks were signalled?                 "I was signalled"
    the end is two windows ahead              is the end set, and was this the batch?

Every window ends with an exchange between all processes, so no process is more than a window ahead of another, and all
read the end before they reach it. Nothing is exchanged until a signal arrives.
"""

import time

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from equipoise.errors import StepError
from equipoise.parallel.communication.processes import Processes

__all__ = ["agree_to_end", "agree_to_save", "is_true_in_any"]

# After both limits a process ends alone, since no signal has reached the rest. Rank 0 may be one window behind, it may
# read the notes of the other ranks one window late, and the third window is for a signal that arrives a moment later.
_ALONE_AFTER = 10.0  # seconds
_ALONE_AFTER_WINDOWS = 3
# Key in the store of the number of batches after which all processes end.
_END = "end/batch"
# What `agree_to_save` sends, where `is_true_in_any` sends 0 or 1: each sees it if another process is at the other call.
_SAVES = 2


def agree_to_end(rank: int, size: int, device: torch.device, batch: int, window: int) -> bool:
    """Return True if all processes end after this batch. A process that was signalled calls it after each batch.

    Args:
        rank: Rank of this process.
        size: Number of processes.
        device: Device of this process.
        batch: Number of batches so far, the same in all processes.
        window: Number of batches from one exchange of gradients to the next.
    """
    # Signals are rare.
    from equipoise.parallel.communication.process_group import group_store

    store = group_store()
    if store is None:
        # Another program began the process group, so no store is available for an agreement.
        return True
    if device.type == "cuda":
        # Exchanges that are only queued do not keep this process from running ahead.
        torch.cuda.synchronize(device)

    # 1. Note that this process was signalled.
    keys = [f"end/signalled/{other_rank}" for other_rank in range(size)]
    key = keys[rank]
    if not store.check([key]):
        store.set(key, f"{time.monotonic()} {batch}")

    # 2. The main process sets the end once all were signalled.
    if rank == 0 and not store.check([_END]) and store.check(keys):
        store.set(_END, str(batch + 2 * window))

    # 3. Compare with the end, or stop waiting for it.
    if store.check([_END]):
        return batch >= int(store.get(_END))
    seconds, batches = _elapsed(store, key, batch)
    return seconds > _ALONE_AFTER and batches > _ALONE_AFTER_WINDOWS * window


def _elapsed(store: Store, key: str, batch: int) -> tuple[float, int]:
    """Return the seconds and the batches since this process was signalled."""
    signal_time, signal_batch = store.get(key).split()
    return time.monotonic() - float(signal_time), batch - int(signal_batch)


# Steps for which only some processes have a batch


def is_true_in_any(value: bool, processes: Processes) -> bool:
    """Return True if the value is True in any process. All of them call this.

    Args:
        value: The value of this process.
        processes: The processes.

    Raises:
        StepError: If another process is about to save a checkpoint.
    """
    numbers = processes.gather_objects(int(value))
    _check_saves(numbers)
    return any(numbers)


def agree_to_save(processes: Processes) -> None:
    """Check that all processes are about to save a checkpoint.

    Args:
        processes: The processes.

    Raises:
        StepError: If one is not.
    """
    _check_saves(processes.gather_objects(_SAVES))


def _check_saves(numbers: list[int]) -> None:
    """Refuse that only some processes are about to save."""
    if _SAVES in numbers and any(number != _SAVES for number in numbers):
        raise StepError(
            "A hook of a batch saves a checkpoint, but only some processes have this batch, and the state of each is"
            " needed. Save in a hook of the epoch, or set `fires_without_batch = True` in the callback: its"
            " `on_train_batch_end` is then called in all processes."
        )
