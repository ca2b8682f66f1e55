"""Indices of the samples in each batch, recorded for callbacks that write predictions."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from equipoise.interop.torch.loaders import with_sampler
from equipoise.notices import rank_zero_warn
from equipoise.strategies.distributed.extent import Extent
from equipoise.trainer.data.batch_stream import BatchStream

__all__ = ["recorded_pass"]


def recorded_pass(
    loader: Any, extent: Extent, on_wrong_length: Callable[[int, int, bool], None], *, record: bool
) -> tuple[BatchStream, list[list[int]] | None]:
    """Return a pass over a loader, and the list to which the indices of each batch's samples are appended.

    Args:
        loader: The loader.
        extent: Number of batches.
        on_wrong_length: See `BatchStream`.
        record: Whether a callback reads the indices. The list is None if not, or if the loader is no DataLoader with a
            batch sampler.
    """
    indices: list[list[int]] | None = None
    if record and isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        indices = []
        loader = with_sampler(loader, _Recorder(loader.batch_sampler, indices), batches=True)
    elif record:
        rank_zero_warn(f"Couldn't infer the batch indices fetched from your dataloader: `{type(loader).__name__}`")
    return BatchStream(loader, extent, on_wrong_length=on_wrong_length), indices


class _Recorder:
    """A batch sampler that records the batches of another."""

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
