"""Indices of the samples in each batch, recorded for callbacks that write predictions."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from equipoise.interop.torch.loaders import with_sampler
from equipoise.notices import rank_zero_warn
from equipoise.strategies.distributed.epoch_length import Extent
from equipoise.trainer.data.batch_stream import BatchStream

__all__ = ["RecordedBatches"]


class RecordedBatches:
    """A pass over a loader that records the indices of each batch's samples.

    Args:
        loader: The loader.
        extent: Number of batches.
        on_wrong_length: See `BatchStream`.
        record: Whether a callback reads the indices.

    Attributes:
        record: Whether they are recorded. Only a DataLoader with a batch sampler has them.
        stream: The pass.
    """

    def __init__(
        self, loader: Any, extent: Extent, on_wrong_length: Callable[[int, int, bool], None], *, record: bool
    ) -> None:
        self.record = record and isinstance(loader, DataLoader) and loader.batch_sampler is not None
        self._indices: list[list[int]] = []
        if self.record:
            recorder = _Recorder(loader.batch_sampler, self._indices)
            loader = with_sampler(loader, recorder, batches=True)
        elif record:
            rank_zero_warn(f"Couldn't infer the batch indices fetched from your dataloader: `{type(loader).__name__}`")
        self.stream = BatchStream(loader, extent, on_wrong_length=on_wrong_length)

    def indices(self, batch_idx: int) -> list[int]:
        """Return the indices of a batch's samples."""
        return self._indices[batch_idx]


class _Recorder:
    """A batch sampler that records the batches of another.

    Args:
        batch_sampler: The other.
        indices: List to which the indices of each batch are appended.
    """

    def __init__(self, batch_sampler: Any, indices: list[list[int]]) -> None:
        self.batch_sampler = batch_sampler
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        # Workers read ahead, so the list may be longer than the number of batches delivered.
        self.indices.clear()
        for batch in self.batch_sampler:
            self.indices.append(list(batch))
            yield batch

    def __len__(self) -> int:
        return len(self.batch_sampler)
