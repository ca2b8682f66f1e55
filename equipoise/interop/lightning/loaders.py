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

__all__ = ["combine", "combined_mode", "seed_workers"]


def combine(loaders: Any, mode: Literal["max_size_cycle", "sequential"]) -> CombinedLoader:
    """A CombinedLoader of what the user gave; a warning of torch about Lightning's own code concerns nobody here."""
    if isinstance(loaders, CombinedLoader):
        return loaders
    if is_a(loaders, CombinedLoader):  # of the other package
        return CombinedLoader(loaders.iterables, loaders._mode)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        return CombinedLoader(loaders, mode)


def combined_mode(loader: CombinedLoader) -> str:
    """How a CombinedLoader reads its loaders; the constructor's argument is kept under a private name."""
    return loader._mode


def seed_workers(loader: Any, rank: int) -> None:
    """Seeds a loader's workers after `seed_everything(workers=True)`; what does it in Lightning is private."""
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(loader, "worker_init_fn", False) is None:
        init: Callable[[int], None] = partial(pl_worker_init_function, rank=rank)
        loader.worker_init_fn = init
