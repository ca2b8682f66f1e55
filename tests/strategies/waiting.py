"""How long a process waits for one that hangs, without a deadline for the start of a run."""

from datetime import timedelta

import torch.distributed as dist

__all__ = ["wait_briefly"]


def wait_briefly() -> None:
    """Let this process wait for others for one second from now on.

    A timeout of the strategy would hold from the start of the processes on, which takes longer on a busy machine.
    """
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
