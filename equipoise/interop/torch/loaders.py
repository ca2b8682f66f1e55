"""Private names of the loaders of torch.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data._utils import collate

__all__ = [
    "collates_tensors_by_stacking",
    "iterator_of",
    "with_collated_batches",
    "with_dataset",
    "with_own_iterator",
    "with_sampler",
]


def with_sampler(loader: DataLoader[Any], sampler: Any, *, batches: bool = False) -> DataLoader[Any]:
    """Return a copy of a loader that draws from another sampler.

    A DataLoader refuses to exchange its sampler, and a subclass cannot be constructed again without knowing its
    arguments. So this sets the copy's attributes below that guard, and drops its cached iterator, which is private.

    Args:
        loader: The loader.
        sampler: A sampler or, if `batches`, a batch sampler.
        batches: True if `sampler` is a batch sampler. Default: False.
    """
    other = copy.copy(loader)
    state = vars(other)
    state["_iterator"] = None
    if batches:
        state["batch_sampler"] = sampler
    else:
        state["sampler"] = sampler
        # The batch sampler holds the sampler as well. That of the user stays.
        if loader.batch_sampler is not None and loader.batch_size is not None:
            state["batch_sampler"] = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    return other


def with_dataset(loader: DataLoader[Any], dataset: Any) -> DataLoader[Any]:
    """Return a copy of a loader that reads another dataset; `with_sampler` explains the copy."""
    other = copy.copy(loader)
    vars(other).update(_iterator=None, dataset=dataset)
    return other


def with_own_iterator(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of a loader that can be read while the loader itself is read; `with_sampler` explains the copy.

    With `persistent_workers` a loader has one iterator, which restarts whenever the loader is read again. The copy
    starts another iterator with other workers, which end with it.

    Args:
        loader: The loader.
    """
    other = copy.copy(loader)
    vars(other)["_iterator"] = None
    return other


def with_collated_batches(loader: DataLoader[Any], batches: Any, collate_fn: Any) -> DataLoader[Any]:
    """Return a copy of a loader that reads collated batches; `with_sampler` explains the copy.

    Args:
        loader: The loader.
        batches: A dataset whose `__getitems__` returns a batch.
        collate_fn: Receives the batch.
    """
    other = copy.copy(loader)
    vars(other).update(dataset=batches, collate_fn=collate_fn)
    return other


def iterator_of(loader: DataLoader[Any], other: DataLoader[Any]) -> Iterator[Any]:
    """Open a copy of a loader in its place.

    With `persistent_workers` a loader keeps its iterator, in a private attribute, and restarts it in later passes.

    Args:
        loader: The loader, which keeps the iterator.
        other: The copy.
    """
    iterator = iter(other)
    vars(loader)["_iterator"] = vars(other)["_iterator"]
    return iterator


def collates_tensors_by_stacking() -> bool:
    """Return True if `default_collate` treats tensors, tuples and dictionaries as torch defines it.

    Programs extend it by entries in a table, which has no public name.
    """
    functions = collate.default_collate_fn_map.values()
    return all(function.__module__ == collate.__name__ for function in functions)
