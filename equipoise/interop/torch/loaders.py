"""Copies of torch's loaders that read something else; the private names that they need have fallbacks."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, default_collate

from equipoise.interop.adapters import find

__all__ = [
    "collates_tensors_by_stacking",
    "iterator_of",
    "with_arguments",
    "with_collated_batches",
    "with_dataset",
    "with_own_iterator",
    "with_sampler",
]

# The functions of `default_collate`, by the types that they collate.
_collate_functions: dict[Any, Any] | None = find("torch.utils.data._utils.collate.default_collate_fn_map")
# The attribute in which a loader with `persistent_workers` keeps its iterator.
_ITERATOR = "_iterator"
# Batches for each worker, torch's default.
_PREFETCH_FACTOR = 2


def with_sampler(loader: DataLoader[Any], sampler: Any, *, batches: bool = False) -> DataLoader[Any]:
    """Return a copy of a loader that draws from another sampler.

    A DataLoader refuses to exchange its sampler, and a subclass cannot be constructed again without knowing its
    arguments. So this sets the copy's attributes below that guard.

    Args:
        loader: The loader.
        sampler: A sampler or, if `batches`, a batch sampler.
        batches: True if `sampler` is a batch sampler. Default: False.
    """
    other = with_own_iterator(loader)
    state = vars(other)
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
    other = with_own_iterator(loader)
    vars(other)["dataset"] = dataset
    return other


def with_arguments(loader: DataLoader[Any], arguments: Mapping[str, Any]) -> DataLoader[Any]:
    """Return a copy of a loader with other workers; `with_sampler` explains the copy.

    Args:
        loader: The loader.
        arguments: `num_workers`, `persistent_workers` and `pin_memory`, as far as they change.
    """
    other = with_own_iterator(loader)
    state = vars(other)
    state |= arguments
    # As the constructor does.
    if state["num_workers"] == 0:
        state |= {"prefetch_factor": None, "persistent_workers": False}
    elif state["prefetch_factor"] is None:
        state["prefetch_factor"] = _PREFETCH_FACTOR
    return other


def with_own_iterator(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of a loader that can be read while the loader itself is read; `with_sampler` explains the copy.

    With `persistent_workers` a loader has one iterator, which restarts whenever the loader is read again. The copy
    starts another iterator with other workers, which end with it.

    Args:
        loader: The loader.
    """
    other = copy.copy(loader)
    state = vars(other)
    if _ITERATOR in state:
        state[_ITERATOR] = None
    else:
        # The copy would restart the iterator that the loader keeps.
        state["persistent_workers"] = False
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

    With `persistent_workers` a loader keeps its iterator, in a private attribute, and restarts it in later passes. If
    torch keeps it elsewhere, the workers start anew in each pass.

    Args:
        loader: The loader, which keeps the iterator.
        other: The copy.
    """
    iterator = iter(other)
    state = vars(loader)
    if _ITERATOR in state:
        state[_ITERATOR] = vars(other)[_ITERATOR]
    return iterator


def collates_tensors_by_stacking() -> bool:
    """Return True if `default_collate` treats tensors, tuples and dictionaries as torch defines it, and torch shows it.

    Programs extend it by entries in a table, which has no public name.
    """
    if _collate_functions is None:
        return False
    return all(function.__module__ == default_collate.__module__ for function in _collate_functions.values())
