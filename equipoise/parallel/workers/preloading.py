"""Modules that the server of worker processes imports once, before it forks them.

Each worker would import them anew otherwise, at the cost of half a second of CPU time per process and run. A module
that workers need registers itself, so that this layer knows none of the layers above it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import set_forkserver_preload

__all__ = ["preload", "preloaded_modules", "preloading"]

# Modules that take long to import, after the one that pauses the garbage collector.
_FIRST = (
    "equipoise.parallel.workers.server_imports.begin",
    "torch",
    "torch._dynamo",
    "torch.nn.parallel.distributed",
)
_LAST = "equipoise.parallel.workers.server_imports.end"
_registered: list[str] = []


def preload(*names: str) -> None:
    """Register modules that the server of worker processes imports when it starts.

    A server that runs already does not import them any more; its workers do so themselves. A module that cannot be
    imported is left to the workers as well.

    Importing such a module must start no thread and must not ask for a CUDA device: neither survives a fork.

    Args:
        names: Full names, such as "torchmetrics.classification".

    Example:
        >>> preload("json", "csv")
        >>> preloaded_modules()[-2:]
        ['json', 'csv']
    """
    _registered.extend(name for name in names if name not in _registered)


def preloaded_modules() -> list[str]:
    """Return the names of the modules that a server started now would import, but the user's and the last one."""
    return [*_FIRST, *_registered]


@contextmanager
def preloading() -> Iterator[None]:
    """Let a server that starts meanwhile import these modules, and then those that the user gave multiprocessing.

    The user's list stays as it is. Of it "__main__" is left out, Python's default: no script runs again.
    """
    from equipoise.interop.distributed.processes import preloaded_by_user

    # Workers find the user's modules after ours.
    user_modules = preloaded_by_user()
    modules = preloaded_modules()
    for name in user_modules:
        if name != "__main__" and name not in modules:
            modules.append(name)
    set_forkserver_preload([*modules, _LAST])
    try:
        yield
    finally:
        set_forkserver_preload(user_modules)
