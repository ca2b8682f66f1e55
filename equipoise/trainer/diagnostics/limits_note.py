"""A note on an error that reports a limit of the process.

It is loaded before a run: a process that may open no more files loads no module either.
"""

from equipoise.errors import CheckpointError

__all__ = ["add_note_on_limits"]

# Messages of the operating system, and what helps.
_LIMITS = {
    "Too many open files": (
        "This process may not open more files. Raise the limit (`ulimit -n`), use fewer loader workers"
        " (`num_workers`), or call `torch.multiprocessing.set_sharing_strategy('file_system')` first, since workers"
        " pass each tensor of a batch in a file of its own."
    ),
    "File too large": (
        "A file that was being written reached the most that this process, or the file system, may write in one file"
        " (`ulimit -f`). Raise that limit, or write to another folder (`default_root_dir`, `dirpath`, `save_dir`)."
    ),
}


def add_note_on_limits(error: BaseException) -> None:
    """Add a note to an error that says that a limit of the process is reached, and not what to do.

    Args:
        error: Any error of a run.
    """
    message = str(error)
    for sign, note in _LIMITS.items():
        if sign in message and not isinstance(error, CheckpointError):
            error.add_note(note)
