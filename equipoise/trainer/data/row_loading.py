"""Loaders whose batches are taken together, where their datasets lie in memory.

Only what reads the samples of a batch is exchanged, in a copy of the loader. So order, random numbers, workers and
pinned memory are those of the loader. A loader with anything of the user's own, be it a subclass or a function, is read
as it is.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader, default_collate

from equipoise.interop.lightning.loaders import seeds_workers
from equipoise.interop.torch.loaders import collates_tensors_by_stacking, iterator_of, with_collated_batches
from equipoise.parallel.batches.sampling import Collate
from equipoise.trainer.data.loader_state import separates_workers
from equipoise.trainer.data.memory_rows import sample_size, take

__all__ = ["open_loader"]

# In smaller batches, samples read one by one are as quick.
_FEWEST_SAMPLES = 4
# Bytes. Workers stack samples directly in shared memory, where rows would have to be copied.
_LARGEST_SAMPLE_IN_WORKER = 1 << 12
# Number of batches in a row that cannot be taken together, after which it is not attempted again.
_MOST_FAILURES = 3


def open_loader(loader: Any) -> Iterator[Any]:
    """Return an iterator over the batches of a loader, as `iter(loader)` does, but taken together where possible."""
    if not _takes_rows(loader):
        return iter(loader)
    collate: Any = loader.collate_fn
    batches = _CollatedRows(loader.dataset, collate)
    finish = collate.divide if isinstance(collate, Collate) else _unchanged
    return iterator_of(loader, with_collated_batches(loader, batches, finish))


def _takes_rows(loader: Any) -> bool:
    if type(loader) is not DataLoader or loader.batch_sampler is None:
        return False
    collate: Any = loader.collate_fn
    # Loaders that processes share have a function around that of the user.
    if isinstance(collate, Collate):
        collate = collate.collate
    if collate is not default_collate or not collates_tensors_by_stacking():
        return False
    # A function of the user may change the dataset of a worker.
    init = loader.worker_init_fn
    if init is not None and not seeds_workers(init) and not separates_workers(init):
        return False
    size = sample_size(loader.dataset)
    return size is not None and (not loader.num_workers or size <= _LARGEST_SAMPLE_IN_WORKER)


class _CollatedRows:
    """A dataset that returns collated batches; `collate` is for samples that must be read one by one."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self._dataset = dataset
        self._collate = collate
        # Number of latest batches that could not be taken together.
        self._failures = 0

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Return the batch of some samples."""
        if self._failures < _MOST_FAILURES and isinstance(indices, list) and len(indices) >= _FEWEST_SAMPLES:
            # Samples read one by one report what is wrong, or can be read nevertheless.
            self._failures += 1
            with suppress(Exception):
                batch = take(self._dataset, indices)
                self._failures = 0
                return batch
        return self._collate(self._samples(indices))

    def _samples(self, indices: Sequence[Any]) -> Any:
        """Return samples as a loader reads them."""
        if hasattr(self._dataset, "__getitems__"):
            return self._dataset.__getitems__(indices)
        return [self._dataset[index] for index in indices]


def _unchanged(batch: Any) -> Any:
    return batch
