"""Save a checkpoint by all processes: each its own shards, the first one all else.

first process                      the others
make a folder, tell its name  ──>
write shards                       write shards
                              <──  tell where they lie
write the rest and the index
rename the folder, tell so    ──>

Elsewhere, where folders cannot be renamed, all write to the folder itself, under names that no earlier save has used.
The index, which is written last and replaced as a whole, turns from the earlier files to the new ones.
"""

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from equipoise.errors import CheckpointError
from equipoise.extensions.fsdp.state.writing.pieces import Piece, write_pieces
from equipoise.interop.remote.files import RemotePath
from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.parallel.shards.disk_faults import is_limit, limit_error
from equipoise.parallel.shards.folder import RemoteFolder, UnfinishedFolder
from equipoise.parallel.shards.index import (
    INDEX,
    Index,
    SavedFile,
    SavedTensor,
    file_of_rank,
    rest_file,
    write_index,
)

__all__ = ["Content", "save_folder"]

T = TypeVar("T")


class WrittenFile(NamedTuple):
    """A file that a process has written.

    Attributes:
        name: Its name.
        file: Its size.
        tensors: The tensors, each with the shard of that process.
    """

    name: str
    file: SavedFile
    tensors: dict[str, SavedTensor]


# Takes a value of this process, and returns those of all, in the order of their ranks.
Exchange = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Content:
    """Content of a checkpoint that one process writes.

    Attributes:
        target: The path of the folder.
        pieces: The shards of this process.
        rest: The content of the file with all that lies in no shards; None in all processes but the first.
    """

    target: AnyPath
    pieces: list[Piece]
    rest: bytes | None


def save_folder(content: Content, rank: int, exchange: Exchange) -> None:
    """Write a checkpoint; called in all processes.

    After a crash at any moment the path holds the complete folder or what was there before.

    Args:
        content: The content that this process writes.
        rank: The number of this process.
        exchange: Returns the values of all processes; called equally often in each.

    Raises:
        CheckpointError: In all processes, if one of them could not write.
    """
    steps = _Steps(content, exchange)
    part = _PartOfProcess(content, rank)
    try:
        # 1. The folder, which the first process makes.
        folder, part.token = steps.run(part.begin)[0]
        part.folder = to_path(folder)
        # 2. The shards of each process.
        written = steps.run(part.write)
        # 3. All else, by the first process.
        steps.run(partial(part.end, written))
    except BaseException:
        part.discard()
        raise


class _PartOfProcess:
    """The part of one process in a save.

    Attributes:
        folder: The folder to which all processes write.
        token: A token in the names of their files.
    """

    folder: AnyPath
    token: str

    def __init__(self, content: Content, rank: int) -> None:
        self._content = content
        self._rank = rank
        # Only in the first process.
        self._unfinished: UnfinishedFolder | RemoteFolder | None = None

    def begin(self) -> tuple[str, str]:
        """Make the folder in the first process, and return its path and the token there."""
        if self._rank > 0:
            return "", ""
        target = self._content.target
        if isinstance(target, RemotePath):
            self._unfinished = RemoteFolder(target)
            return os.fspath(target), f"-{uuid4().hex[:8]}"
        self._unfinished = UnfinishedFolder(target)
        return os.fspath(self._unfinished.path), ""

    def write(self) -> WrittenFile:
        """Write the shards of this process, and return where they lie."""
        path = self.folder / file_of_rank(self._rank, self.token)
        tensors = write_pieces(path, self._content.pieces)
        return WrittenFile(path.name, SavedFile(path.stat().st_size), tensors)

    def end(self, written: list[WrittenFile]) -> None:
        """Write all else in the first process, and make the folder a checkpoint.

        Args:
            written: The files of all processes.
        """
        rest = self._content.rest
        if self._unfinished is None or rest is None:
            return
        # The index comes last, since a folder with an index is a checkpoint.
        index = _merge(written)
        name = rest_file(self.token)
        index.files[name] = SavedFile(len(rest), zlib.crc32(rest))
        _write(self.folder / name, rest)
        if isinstance(self._unfinished, RemoteFolder):
            self._unfinished.check(index)
        _write(self.folder / INDEX, write_index(index))
        self._unfinished.publish()

    def discard(self) -> None:
        """Remove the folder."""
        if self._unfinished is not None:
            self._unfinished.discard()


class _Steps:
    """Steps that all processes carry out together, so that each learns of an error in any of them."""

    def __init__(self, content: Content, exchange: Exchange) -> None:
        self._target = content.target
        self._needed = sum(piece.tensor.nbytes for piece in content.pieces) + len(content.rest or b"")
        self._exchange = exchange

    def run(self, compute: Callable[[], T]) -> list[T]:
        """Return the results of all processes.

        Args:
            compute: The step of this process.

        Raises:
            CheckpointError: If it failed in any of them.
        """
        result: T | None = None
        problem: str | None = None
        cause: Exception | None = None
        # 1. The step. The others wait for its result, also if it fails.
        try:
            result = compute()
        except Exception as error:
            problem = self._describe(error)
            cause = error

        # 2. The results, or the first problem.
        results: list[Any] = []
        outcomes = self._exchange((result, problem))
        for result_of_process, problem_of_process in outcomes:
            if problem_of_process is not None:
                raise CheckpointError(problem_of_process) from cause
            results.append(result_of_process)
        return results

    def _describe(self, error: Exception) -> str:
        # Its message is meant for the user already.
        if isinstance(error, CheckpointError):
            return str(error)
        if isinstance(error, OSError) and isinstance(self._target, Path) and is_limit(error):
            return str(limit_error(self._target, error, self._needed))
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        if isinstance(error, FileNotFoundError):
            reason = "a process does not see the folder that the first one has made. All machines need one file system"
        return (
            f"The checkpoint {str(self._target)!r} cannot be written: {reason}. Checkpoints that were there before are"
            " unchanged."
        )


def _merge(written: list[WrittenFile]) -> Index:
    """Return the index of what all processes have written."""
    index = Index()
    for name, file, tensors in written:
        index.files[name] = file
        for tensor_name, tensor in tensors.items():
            together = index.tensors.setdefault(tensor_name, SavedTensor(tensor.dtype, tensor.shape))
            together.chunks.extend(tensor.chunks)
    return index


def _write(path: AnyPath, data: bytes) -> None:
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
