"""Errors of a file system whose cause is a limit: what they mean, and what to do."""

import errno
import shutil
from pathlib import Path

from equipoise.errors import CheckpointError

__all__ = ["is_limit", "limit_error"]

_SPACE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than this process may write (`ulimit -f`)",
}
_HANDLES = {
    errno.EMFILE: "this process has too many open files (`ulimit -n`)",
    errno.ENFILE: "the machine has too many open files",
}


def is_limit(error: BaseException) -> bool:
    """Return whether an error says that a limit of the disk or of the process is reached."""
    return isinstance(error, OSError) and (error.errno in _SPACE or error.errno in _HANDLES)


def limit_error(target: Path, cause: OSError, needed: int) -> CheckpointError:
    """Return the error for a checkpoint or another file that a limit keeps from being written.

    Args:
        target: Its path, whose folder need not exist.
        cause: The error of the file system; see `is_limit`.
        needed: The size of what this process has to write, in bytes; 0: nothing is known of it.
    """
    code = cause.errno or 0
    begin = f"{str(target)!r} cannot be written: {_SPACE.get(code) or _HANDLES[code]}."
    kept = "Files that were there before are unchanged."
    if code in _HANDLES:
        return CheckpointError(
            f"{begin} {kept} Raise the limit, use fewer loader workers (`num_workers`), or call"
            " `torch.multiprocessing.set_sharing_strategy('file_system')` before the loaders start."
        )
    # The folder itself may be what found no place.
    folder = next(parent for parent in target.absolute().parents if parent.is_dir())
    sizes = f"{shutil.disk_usage(folder).free:,} bytes are free on that disk"
    if needed:
        sizes = f"It needs {needed:,} bytes, and {sizes}"
    return CheckpointError(
        f"{begin} {sizes}. {kept} Free some space, keep fewer checkpoints (`ModelCheckpoint(save_top_k=...)`), or"
        " choose another folder (`dirpath`)."
    )
