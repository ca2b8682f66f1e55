"""Checkpoints as folders, to which each process writes its own part: what the trainer asks of a strategy for that."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

__all__ = ["CheckpointFolders"]

# Every method but `after_saving` is called in all processes, in the same order.


class CheckpointFolders(ABC):
    """Writes the checkpoints of a run as folders."""

    @abstractmethod
    def collecting(self) -> AbstractContextManager[None]:
        """Return a context in which `PortableState` returns placeholders for tensors in shards, and notes the tensors.

        The content of a checkpoint is collected in it.
        """

    @abstractmethod
    def save(self, path: str | os.PathLike[str], rest: bytes | None) -> None:
        """Write what was collected.

        Args:
            path: The path of the folder.
            rest: The file with everything else, in which placeholders stand for the tensors; None in all processes but
                the main one.

        Raises:
            CheckpointError: If this checkpoint, or the last one that was written in the background, cannot be written.
        """

    @abstractmethod
    def after_saving(self, function: Callable[[], None]) -> None:
        """Call a function in the main process once the last checkpoint is complete; never, if it does not become so.

        Args:
            function: The function, such as one that removes an earlier checkpoint.
        """

    @abstractmethod
    def finish(self, seconds: float | None = None) -> None:
        """Wait until the last checkpoint is complete.

        Args:
            seconds: The longest time. Default: None, without limit.

        Raises:
            CheckpointError: If it could not be written.
        """
