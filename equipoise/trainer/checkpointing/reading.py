"""Read a checkpoint for a run, migrated to the present version and checked."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from equipoise.errors import CheckpointError
from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.notices import rank_zero_warn
from equipoise.trainer.checkpointing.entry_checks import loading
from equipoise.trainer.checkpointing.file import OUR_KEY
from equipoise.trainer.checkpointing.file_reading import (
    check_contents,
    check_is_file,
    explaining_reads,
    open_checkpoint,
    read_checkpoint,
)
from equipoise.trainer.checkpointing.layout import check_layout, check_version
from equipoise.trainer.checkpointing.objects import warn_of_objects_read

__all__ = ["ReadValues", "check_is_no_part", "load_checkpoint", "open_any_checkpoint", "read_folder", "run_of"]

ReadValues = Callable[[Tensor], Iterator[Tensor]]
"""Yields the values of a tensor in order, in pieces of any shape, on the CPU."""


def load_checkpoint(
    path: Any,
    checkpoint_io: CheckpointIO | None = None,
    *,
    weights_only: bool | None = None,
    fitting: bool = True,
    keep_shards: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint, and migrate one of an older Lightning.

    Args:
        path: The path of the file, or of the folder of a sharded checkpoint; or of a file of weights, see `format_of`.
        checkpoint_io: The plugin that wrote the file. None: Equipoise or Lightning wrote it.
        weights_only: False creates the objects in it, which runs any code that it names. None or True: it is read as
            data, and stand-ins take the places of objects. Default: None.
        fitting: Whether a training resumes from it. Default: True.
        keep_shards: Whether placeholders stand for tensors of a sharded checkpoint, of which each process then reads
            what it needs. Default: False, they are whole.

    Returns:
        The content of the file.

    Raises:
        CheckpointError: If it cannot be read, or does not have the layout of a checkpoint.
    """
    from equipoise.parallel.shards.reading import has_shards
    from equipoise.trainer.checkpointing.module.weight_formats import format_of

    # 1. Read the file.
    place = to_path(path)
    weight_format = format_of(path, checkpoint_io)
    if weight_format is not None:
        check_is_file(place)
        # Callbacks receive the weights, too, as from a checkpoint without states of callbacks.
        return {"state_dict": weight_format.read(path), "callbacks": {}}
    if weights_only is False:
        rank_zero_warn(
            f"weights_only=False: the code that the checkpoint {os.fspath(path)!r} names is run. Do so only with files"
            " that you trust."
        )
    check_is_no_part(place)
    if has_shards(place):
        checkpoint = read_folder(place, weights_only=weights_only is not False, keep_shards=keep_shards)
    else:
        checkpoint = _read_file(path, place, checkpoint_io, weights_only=weights_only is not False)
    rank_zero_info(f"Restoring states from the checkpoint path at {path}")

    # 2. Migrate it. Lightning changes the content, which may be damaged in any way.
    if "pytorch-lightning_version" in checkpoint:
        from lightning.pytorch.utilities.migration import migrate_checkpoint

        check_version(checkpoint)
        with loading("pytorch-lightning_version"):
            checkpoint, _ = migrate_checkpoint(checkpoint)

    # 3. Check it.
    check_layout(checkpoint)
    warn_of_objects_read(checkpoint, fitting=fitting)
    return checkpoint


def check_is_no_part(path: AnyPath) -> None:
    """Check that a path is not that of a file in a sharded checkpoint.

    Raises:
        CheckpointError: If it is.
    """
    from equipoise.parallel.shards.reading import folder_of_part

    folder = folder_of_part(path)
    if folder is not None:
        raise CheckpointError(
            f"{os.fspath(path)!r} is a part of a sharded checkpoint, which is the folder {str(folder)!r}. Pass the"
            " folder."
        )


def read_folder(path: AnyPath, *, weights_only: bool = True, keep_shards: bool = False) -> dict[str, Any]:
    """Read a sharded checkpoint: its file beside the shards as any checkpoint, and the shards as bytes.

    Args:
        path: The folder.
        weights_only: See `read_checkpoint`. Default: True.
        keep_shards: Leave placeholders for tensors in shards, of which each process then reads what it needs.
            Default: False, all tensors are whole and on the CPU.

    Returns:
        The content, as that of a file.

    Raises:
        CheckpointError: If it is not complete, of another format, or damaged.
    """
    from equipoise.parallel.shards.reading import ShardReader
    from equipoise.parallel.shards.sources import connect_placeholders, fetch_placeholders

    reader = ShardReader(path)
    checkpoint = read_checkpoint(reader.rest, weights_only=weights_only)
    if keep_shards:
        connect_placeholders(checkpoint, reader)
    else:
        fetch_placeholders(checkpoint, reader)
    return checkpoint


@contextmanager
def open_any_checkpoint(path: str | os.PathLike[str]) -> Iterator[tuple[dict[str, Any], ReadValues]]:
    """Open a checkpoint, a file or a folder of shards, whose values are read piece by piece, as data.

    Args:
        path: A local path, or a URL that fsspec knows.

    Yields:
        The content, with all tensors on the meta device, and what reads the values of one.

    Raises:
        CheckpointError: If it cannot be read.
    """
    from equipoise.parallel.shards.reading import ShardReader, has_shards
    from equipoise.parallel.shards.sources import connect_placeholders, source_of

    file = to_path(path)
    check_is_no_part(file)
    reader = None
    if has_shards(file):
        reader = ShardReader(file)
        file = reader.rest
    with open_checkpoint(file) as archive:
        if reader is not None:
            connect_placeholders(archive.content, reader)

        def read(tensor: Tensor) -> Iterator[Tensor]:
            source = source_of(tensor)
            if source is not None:
                yield from source.pieces()
                return
            with explaining_reads(file):
                yield from archive.pieces_of(tensor)

        yield archive.content, read


def run_of(path: Any, checkpoint_io: CheckpointIO | None = None) -> str | None:
    """Return the identity of the run that wrote a checkpoint; values of tensors are not read, except by a plugin.

    Args:
        path: The path of the file, or of the folder of a sharded checkpoint.
        checkpoint_io: The plugin that wrote the file. None: Equipoise or Lightning wrote it.

    Returns:
        The identity; None if the file has none, or cannot be read.
    """
    from equipoise.parallel.shards.reading import ShardReader, has_shards

    try:
        place = to_path(path)
        if has_shards(place):
            path = place = ShardReader(place).rest
        checkpoint = _read_file(path, place, checkpoint_io, weights_only=True, values=False)
        run = checkpoint.get(OUR_KEY, {}).get("run")
    except Exception:
        # A damaged file, or a plugin, may raise any error.
        return None
    return run if isinstance(run, str) else None


def _reads_common_files(checkpoint_io: CheckpointIO) -> bool:
    """Return whether a plugin reads by Lightning's own method, so that its files are ordinary files of torch."""
    reader: Any = checkpoint_io
    # This one writes in the background, and reads by another one.
    if isinstance(checkpoint_io, AsyncCheckpointIO):
        reader = checkpoint_io.checkpoint_io
    return type(reader).load_checkpoint is TorchCheckpointIO.load_checkpoint


def _read_file(
    path: Any, place: AnyPath, checkpoint_io: CheckpointIO | None, *, weights_only: bool, values: bool = True
) -> dict[str, Any]:
    """Read a file by a plugin, if only that can; it reads all values, and receives the path as the user wrote it."""
    if checkpoint_io is None or _reads_common_files(checkpoint_io):
        return read_checkpoint(place, weights_only=weights_only, values=values)
    try:
        checkpoint: dict[str, Any] = checkpoint_io.load_checkpoint(path, weights_only=weights_only)
    except UnpicklingError as error:
        # The other lines are advice for torch.load.
        reason = str(error).split("\n")[0].rstrip(".")
        raise CheckpointError(
            f"{type(checkpoint_io).__name__} cannot read the checkpoint {os.fspath(path)!r} with weights_only=True:"
            f" {reason}. If you trust the file, pass weights_only=False."
        ) from error
    check_contents(checkpoint, path)
    return checkpoint
