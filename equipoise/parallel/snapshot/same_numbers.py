"""Random numbers that all processes draw alike, between those that each draws for itself."""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar

from equipoise.parallel.snapshot import random_state

__all__ = ["SameNumbers", "drawn_alike"]

T = TypeVar("T")


class SameNumbers:
    """The generators of the host in a `with` block: they follow from a seed, and continue where the last block ended.

    After the block the generators are as before it. Those of GPUs stay as they are.

    Args:
        seed: The same number in all processes.

    Example:
        >>> import torch
        >>> numbers = SameNumbers(1)
        >>> with numbers:
        ...     first = torch.rand(())
        >>> with numbers:
        ...     second = torch.rand(())
        >>> generator = torch.Generator().manual_seed(1)
        >>> torch.equal(torch.stack([first, second]), torch.rand(2, generator=generator))
        True
    """

    def __init__(self, seed: int) -> None:
        self._state = random_state.seeded(seed)
        self._state_outside = self._state

    def __enter__(self) -> None:
        self._state_outside = random_state.capture_host()
        self._state.restore()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state = random_state.capture_host()
        self._state_outside.restore()


def drawn_alike(open_items: Callable[[], Iterator[T]], seed: int) -> Iterator[T]:
    """Return items whose random numbers are the same in all processes.

    Args:
        open_items: Returns the items; called at once.
        seed: The same number in all processes.
    """
    numbers = SameNumbers(seed)
    with numbers:
        items = open_items()
    return _drawn(items, numbers)


def _drawn(items: Iterator[T], numbers: SameNumbers) -> Iterator[T]:
    while True:
        with numbers:
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
        # Do not hold the item while the next one is drawn.
        del item
