"""Agreement of all processes on the batch after which they end, once one received a signal.

    rank 0                                    every rank, after each batch since its signal
    all ranks were signalled?                 "I was signalled"
    the end is two windows ahead              is the end known, and was this the batch?

Every window ends with an exchange between all processes, so none is more than a window ahead of another, and all read
the end before they come to it. Nothing is exchanged until a signal comes.
"""

import time

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from equipoise.parallel.communication.process_group import group_store

__all__ = ["agree_to_end"]

# After both a process ends without the others, which no signal has reached. One window is what rank 0 may be behind,
# another what it may have missed of the others' notes, and the third is for a signal that comes a moment later.
_ALONE_AFTER = 10.0  # seconds
_ALONE_AFTER_WINDOWS = 3
_END = "end/batch"


def agree_to_end(rank: int, size: int, device: torch.device, batch: int, window: int) -> bool:
    """Return whether all processes end after this batch; called after each batch by a process that was signalled.

    Args:
        rank: The number of this process.
        size: The number of processes.
        device: Where this process computes.
        batch: The number of batches so far, the same in all processes.
        window: The number of batches from one exchange of gradients to the next.
    """
    store = group_store()
    if store is None:
        return True  # the process group is another program's
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # exchanges that were only queued do not hold this process back
    signalled = [f"end/signalled/{each}" for each in range(size)]
    if not store.check([signalled[rank]]):
        store.set(signalled[rank], f"{time.monotonic()} {batch}")
    if rank == 0 and not store.check([_END]) and store.check(signalled):
        store.set(_END, str(batch + 2 * window))
    if store.check([_END]):
        return batch >= int(store.get(_END))
    seconds, batches = _passed(store, signalled[rank], batch)
    return seconds > _ALONE_AFTER and batches > _ALONE_AFTER_WINDOWS * window


def _passed(store: Store, key: str, batch: int) -> tuple[float, int]:
    """Return the seconds and the batches since this process was signalled."""
    moment, first = store.get(key).split()
    return time.monotonic() - float(moment), batch - int(first)
