"""Private names around the loaders of Lightning.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities import CombinedLoader

from equipoise.interop.lightning.classes import is_a

__all__ = ["combine", "combined_mode", "seed_workers", "seeds_workers"]


def combine(loaders: Any, mode: Literal["max_size_cycle", "sequential"]) -> CombinedLoader:
    """Return a CombinedLoader of the user's loaders, without torch's warning about Lightning's own code."""
    if isinstance(loaders, CombinedLoader):
        return loaders
    if is_a(loaders, CombinedLoader):
        # It is of the older package.
        return CombinedLoader(loaders.iterables, loaders._mode)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        return CombinedLoader(loaders, mode)


def combined_mode(loader: CombinedLoader) -> str:
    """Return the mode in which a CombinedLoader reads its loaders; the attribute has a private name."""
    return loader._mode


def seed_workers(loader: Any, rank: int) -> None:
    """Seed a loader's workers after `seed_everything(workers=True)`; Lightning's function for this is private."""
    seeds_workers = int(os.environ.get("PL_SEED_WORKERS", 0))
    if not seeds_workers:
        return
    # A loader without this attribute has no workers to seed.
    if getattr(loader, "worker_init_fn", False) is None:
        init: Callable[[int], None] = partial(pl_worker_init_function, rank=rank)
        loader.worker_init_fn = init


def seeds_workers(init: Any) -> bool:
    """Return True if a function that initialises workers is the one that `seed_workers` sets; its name is private.

    Args:
        init: A loader's `worker_init_fn`.
    """
    return isinstance(init, partial) and init.func is pl_worker_init_function
