"""Private names around the loaders of Lightning.

Each name has a comment with the reason why no public one suffices, and with the way of versions without it.
"""

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from lightning.pytorch.utilities import CombinedLoader

from equipoise.interop.adapters import find
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.refusal import refusal

__all__ = ["combine", "seed_workers", "seeds_workers"]

# Without it workers keep the seeds that torch gives them.
_SEED_WORKER: Callable[..., None] | None = find("lightning.fabric.utilities.seed.pl_worker_init_function")


def combine(loaders: Any, mode: Literal["max_size_cycle", "sequential"]) -> tuple[CombinedLoader, str]:
    """Return a CombinedLoader of the user's loaders, without torch's warning about Lightning's own code, and its mode.

    Args:
        loaders: A loader, a structure of loaders, or a CombinedLoader, which keeps its mode.
        mode: The mode of any other.

    Raises:
        ConfigurationError: If the mode of a CombinedLoader cannot be read: the attribute has a private name.
    """
    if not is_a(loaders, CombinedLoader):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            return CombinedLoader(loaders, mode), mode
    mode_of_user: Any = getattr(loaders, "_mode", None)
    if mode_of_user is None:
        remedy = "Pass the loaders as a dictionary or a list."
        raise refusal("A CombinedLoader of your own", "lightning", ["CombinedLoader._mode"], remedy)
    if not isinstance(loaders, CombinedLoader):
        # It is of the older package.
        loaders = CombinedLoader(loaders.iterables, mode_of_user)
    return loaders, mode_of_user


def seed_workers(loader: Any, rank: int) -> None:
    """Seed a loader's workers after `seed_everything(workers=True)`; Lightning's function for this is private."""
    seeds_workers = int(os.environ.get("PL_SEED_WORKERS", 0))
    if not seeds_workers or _SEED_WORKER is None:
        return
    # A loader without this attribute has no workers to seed.
    if getattr(loader, "worker_init_fn", False) is None:
        loader.worker_init_fn = partial(_SEED_WORKER, rank=rank)


def seeds_workers(init: Any) -> bool:
    """Return True if a function that initialises workers is the one that `seed_workers` sets; its name is private.

    Args:
        init: A loader's `worker_init_fn`.
    """
    return isinstance(init, partial) and init.func is _SEED_WORKER
