"""Time that others wait for a process that hangs, without a deadline for the start of a run."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from equipoise.parallel.workers import launch

__all__ = ["blame_early", "wait_briefly"]


def wait_briefly() -> None:
    """Let this process wait for others for one second from now on.

    A timeout of the strategy would hold from the start of the processes on, which takes longer on a busy machine.
    """
    # torch 2.13 and older have a private name alone.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=1))


def blame_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the parent name the process that hangs one second after the others gave up, rather than ten."""
    monkeypatch.setattr(launch, "_UNTIL_CAUSE", 1.0)
