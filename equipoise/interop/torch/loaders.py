"""Private names of the loaders of torch.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

import copy
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

__all__ = ["with_dataset", "with_own_iterator", "with_sampler"]


def with_sampler(loader: DataLoader[Any], sampler: Any, *, batches: bool = False) -> DataLoader[Any]:
    """A copy of a loader that draws from another sampler.

    A DataLoader refuses to exchange its sampler, and a subclass cannot be constructed again without knowing its
    arguments; so the copy's attributes are set below that guard, and its cached iterator, which is private, is
    dropped.

    Args:
        loader: The loader.
        sampler: A sampler or, if `batches`, a batch sampler.
        batches: Which of the two it is.
    """
    other = copy.copy(loader)
    state = vars(other)
    state["_iterator"] = None
    if batches:
        state["batch_sampler"] = sampler
    else:
        state["sampler"] = sampler
        if loader.batch_sampler is not None and loader.batch_size is not None:
            state["batch_sampler"] = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    return other


def with_dataset(loader: DataLoader[Any], dataset: Any) -> DataLoader[Any]:
    """A copy of a loader that reads other data, made as by `with_sampler`."""
    other = copy.copy(loader)
    vars(other).update(_iterator=None, dataset=dataset)
    return other


def with_own_iterator(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy of a loader that can be read while the loader itself is; made as by `with_sampler`.

    With `persistent_workers` a loader has one iterator, which begins anew whenever the loader is read again. The copy
    has one of its own, with workers of its own, which end with it.

    Args:
        loader: The loader.
    """
    other = copy.copy(loader)
    vars(other)["_iterator"] = None
    return other
