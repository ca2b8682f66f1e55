"""Private names around processes, of torch and of Python, each with the reason why nothing public does."""

from typing import Any

from equipoise.interop.adapters import find

__all__ = ["collective_count", "preloaded_by_user"]


# Torch's record of the groups of a process.
_world: Any = find("torch.distributed.distributed_c10d._world")


def collective_count() -> int:
    """Count the collective operations that this process has begun, in all groups.

    Torch numbers them to find a process that hangs, but has no public name for the numbers. A feature that needs them
    is refused without it.
    """
    return sum(group._get_sequence_number_for_group() for group in _world.pg_map)


def preloaded_by_user() -> list[str]:
    """Return the latest argument of `multiprocessing.set_forkserver_preload`, or Python's default.

    No public name reads it. If Python keeps it elsewhere, the user's list is lost.
    """
    # Looked up here, since systems that cannot fork need not have the module.
    server = find("multiprocessing.forkserver._forkserver")
    return list(getattr(server, "_preload_modules", ["__main__"]))
