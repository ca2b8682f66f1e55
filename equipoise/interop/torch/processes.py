"""Private names around processes, of torch and of Python.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

from multiprocessing import forkserver
from typing import Any

import torch.distributed as dist

__all__ = ["collective_count", "preloaded_by_user"]


def collective_count() -> int:
    """How many collective operations this process has begun, in all groups.

    Torch numbers them, to find out which process hangs, and tells nobody.
    """
    world: Any = dist.distributed_c10d
    return sum(group._get_sequence_number_for_group() for group in world._world.pg_map)


def preloaded_by_user() -> list[str]:
    """Return the modules that `multiprocessing.set_forkserver_preload` was given last: no public name reads them."""
    return list(vars(forkserver._forkserver).get("_preload_modules", []))
