"""Loaders whose batches are taken at once, where their datasets lie in memory.

Only what reads the samples of a batch is exchanged, and only while the loader creates its iterator. So order, random
numbers, workers and pinned memory are those of the loader. A loader with anything of the user's own, be it a subclass
or a function, stays as it is.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.utils.data import DataLoader, default_collate

from equipoise.interop.lightning.loaders import seeds_workers
from equipoise.interop.torch.loaders import collates_tensors_by_stacking
from equipoise.parallel.batches.sampling import Collate
from equipoise.trainer.data.memory_rows import Rows, rows_of

__all__ = ["rows_at_once"]


@contextmanager
def rows_at_once(loader: Any) -> Iterator[None]:
    """Let a loader take the rows of a batch at once, if it creates its iterator within the context.

    Args:
        loader: Any loader. Those whose samples must be read one by one are left as they are.
    """
    rows = _rows_of_loader(loader)
    if rows is None:
        yield
        return
    # The loader's setter refuses to exchange these, so the exchange goes below it.
    state = vars(loader)
    dataset = loader.dataset
    collate = loader.collate_fn
    state["dataset"] = _CollatedRows(dataset, rows, collate)
    state["collate_fn"] = _unchanged
    try:
        yield
    finally:
        state["dataset"] = dataset
        state["collate_fn"] = collate


def _rows_of_loader(loader: Any) -> Rows | None:
    """Return the rows of a loader's dataset; None if its batches are read sample by sample."""
    if type(loader) is not DataLoader or loader.batch_sampler is None:
        return None
    collate: Any = loader.collate_fn
    # Loaders that processes share have a function around that of the user.
    if type(collate) is Collate:
        collate = collate.collate
    if collate is not default_collate or not collates_tensors_by_stacking():
        return None
    # A function of the user may change the dataset of a worker.
    if loader.worker_init_fn is not None and not seeds_workers(loader.worker_init_fn):
        return None
    return rows_of(loader.dataset)


class _CollatedRows:
    """A dataset that returns collated batches.

    Args:
        dataset: The dataset.
        rows: Its rows.
        collate: Collates samples that must be read one by one.
    """

    def __init__(self, dataset: Any, rows: Rows, collate: Any) -> None:
        self._dataset = dataset
        self._rows = rows
        self._collate = collate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Return the batch of some samples."""
        if isinstance(indices, list) and indices:
            # Samples read one by one report what is wrong, or can be read nevertheless.
            with suppress(Exception):
                return self._rows.take(indices)
        samples = self._samples(indices)
        return self._collate(samples)

    def _samples(self, indices: Sequence[Any]) -> Any:
        """Return samples as a loader reads them."""
        if hasattr(self._dataset, "__getitems__"):
            return self._dataset.__getitems__(indices)
        return [self._dataset[index] for index in indices]


def _unchanged(batch: Any) -> Any:
    return batch
