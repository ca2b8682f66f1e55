"""A sharded checkpoint, written as one file, which any strategy and Lightning load."""

import os
from pathlib import Path

from equipoise.errors import CheckpointError
from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.parallel.shards.reading import is_sharded_checkpoint
from equipoise.trainer.checkpointing.file import write_checkpoint
from equipoise.trainer.checkpointing.reading import read_folder

__all__ = ["merge_shards"]


def merge_shards(
    folder: str | os.PathLike[str], path: str | os.PathLike[str], *, weights_only: bool | None = None
) -> AnyPath:
    """Write a sharded checkpoint as one file, by this process alone.

    The file is that of a run with whole checkpoints: `load_from_checkpoint`, `ckpt_path` and Lightning take it.

    Args:
        folder: The checkpoint, or its URL, of a run with `FSDPStrategy(checkpoints="sharded")`.
        path: The file to write, or its URL; not the folder itself.
        weights_only: See `Trainer.fit`; False for a checkpoint that holds objects, such as hyperparameters of classes.
            Default: None.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: If the folder is not complete, of another format, or damaged; or the file cannot be written.

    Example:
        >>> merge_shards("last.ckpt", "last-whole.ckpt")  # doctest: +SKIP
        PosixPath('last-whole.ckpt')
    """
    source, target = to_path(folder), to_path(path)
    if _resolved(source) == _resolved(target):
        raise CheckpointError(f"{str(target)!r} is the sharded checkpoint itself. Choose another path for the file.")
    if source.is_file() and not is_sharded_checkpoint(source):
        raise CheckpointError(f"{str(source)!r} is a file, so it is whole already.")
    write_checkpoint(read_folder(source, weights_only=weights_only is not False), target)
    return target


def _resolved(path: AnyPath) -> AnyPath:
    return path.resolve() if isinstance(path, Path) else path
