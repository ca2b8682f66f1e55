"""Checkpoints of a module in shards as folders: each process writes its shards, immediately or in the background."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from equipoise.extensions.fsdp.state.writing.background import InBackground
from equipoise.extensions.fsdp.state.writing.pieces import HostCopies, pieces_of
from equipoise.extensions.fsdp.state.writing.saving import Content, save_folder
from equipoise.interop.remote.paths import to_path
from equipoise.parallel.communication.object_exchange import gather_objects
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.shards.placeholders import make_placeholder
from equipoise.strategies.checkpoint_folders import CheckpointFolders

__all__ = ["CollectedShards", "ShardFolders"]


class CollectedShards(dict[str, DTensor]):
    """Tensors in shards of a checkpoint, by names that are the same in all processes, with placeholders for them."""

    def add(self, name: str, value: Any) -> Any:
        """Return a placeholder for a tensor in shards; everything else is returned as it is.

        Args:
            name: The name of the tensor in the checkpoint.
            value: The value.
        """
        if not isinstance(value, DTensor):
            return value
        self[name] = value
        return make_placeholder(value, name)


class ShardFolders(CheckpointFolders):
    """Writes folders of shards, in all processes together.

    In the background, a step waits for a copy of the shards to the memory of the host. A thread writes it, and
    exchanges what is needed for that in a group of its own: exchanges of the steps would mix with those of the default
    group.

    Args:
        processes: The processes.
        group: The group of the thread. None: checkpoints are written immediately.

    Attributes:
        collected: The shards of the checkpoint that is being collected; None at other times.
    """

    def __init__(self, processes: Processes, group: dist.ProcessGroup | None) -> None:
        self.collected: CollectedShards | None = None
        self._processes = processes
        self._rank = processes.rank
        self._group = group
        self._tensors: CollectedShards | None = None
        self._copies = HostCopies()
        self._background = InBackground("checkpoint")
        # What is to be done once the checkpoint is complete that is being written.
        self._afterwards: list[Callable[[], None]] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Note tensors in shards; see `CheckpointFolders.collecting`."""
        self.collected = CollectedShards()
        # After an error in a hook of the user's, tensors are gathered again.
        try:
            yield
            self._tensors = self.collected
        finally:
            self.collected = None

    def save(self, path: str | os.PathLike[str], rest: bytes | None) -> None:
        """Write what was collected; see `CheckpointFolders.save`."""
        assert self._tensors is not None
        # 1. The memory of the last copy is used again.
        self.finish()
        target = to_path(path)
        pieces = pieces_of(self._saved_here(self._tensors))
        self._tensors = None
        # 2. Write. Nothing changes the tensors until the next step, so no copy is needed immediately.
        if self._group is None:
            content = Content(target, pieces, rest)
            save_folder(content, self._rank, gather_objects)
            return
        content = Content(target, self._copies.take(pieces), rest)
        self._background.start(partial(self._write, content, self._group))

    def _saved_here(self, tensors: dict[str, DTensor]) -> dict[str, DTensor]:
        """Return the tensors of which this process saves its shard.

        Those that lie on a column of the processes alone are the same in each column, and the first one saves them.
        """
        saved = {}
        for name, tensor in tensors.items():
            columns = self._processes.world_size // tensor.device_mesh.size()
            if self._rank % columns == 0:
                saved[name] = tensor
        return saved

    def _write(self, content: Content, group: dist.ProcessGroup) -> None:
        def exchange(value: Any) -> list[Any]:
            return gather_objects(value, group)

        save_folder(content, self._rank, exchange)
        while self._afterwards:
            function = self._afterwards.pop(0)
            function()

    def after_saving(self, function: Callable[[], None]) -> None:
        """Call a function once the last checkpoint is complete; see `CheckpointFolders.after_saving`."""
        if self._background.is_busy:
            # The thread calls it, or `finish` if the thread has ended meanwhile.
            self._afterwards.append(function)
        else:
            function()

    def finish(self, seconds: float | None = None) -> None:
        """Wait until the last checkpoint is complete; see `CheckpointFolders.finish`."""
        try:
            self._background.wait(seconds)
        except BaseException:
            self._afterwards.clear()
            raise
        while self._afterwards:
            function = self._afterwards.pop(0)
            function()
