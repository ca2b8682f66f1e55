"""Private names around processes, of torch and of Python.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

from multiprocessing import forkserver
from typing import Any

import torch.distributed as dist

__all__ = ["collective_count", "preloaded_by_user"]


def collective_count() -> int:
    """Count the collective operations that this process has begun, in all groups.

    Torch numbers them to find a process that hangs, but has no public name for the numbers.
    """
    world: Any = dist.distributed_c10d
    return sum(group._get_sequence_number_for_group() for group in world._world.pg_map)


def preloaded_by_user() -> list[str]:
    """Return the latest argument of `multiprocessing.set_forkserver_preload`; no public name reads it."""
    return list(vars(forkserver._forkserver).get("_preload_modules", []))
