"""Notes on the error of a run, where its message says what is wrong and not what to do.

They are loaded before a run: a process that may open no more files loads no module either.
"""

import re
from difflib import get_close_matches
from traceback import walk_tb
from types import FrameType

from lightning.pytorch import LightningModule

from equipoise.errors import CheckpointError
from equipoise.interop.lightning.classes import is_a

__all__ = ["add_run_notes"]

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


def add_run_notes(error: BaseException) -> None:
    """Add notes on limits of the process, on data, monitored values, nested runs, and a missing device mesh.

    Args:
        error: Any error of a run.
    """
    message = str(error)
    for sign, note in _LIMITS.items():
        if sign in message and not isinstance(error, CheckpointError):
            error.add_note(note)
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    # The message of an error of a worker process contains its traceback.
    functions = [frame.f_code.co_name for frame in frames]
    is_in_collate = "collate" in message or any(name.startswith("collate") for name in functions)
    if "stack expects each tensor to be equal size" in message and is_in_collate:
        error.add_note(
            "Samples of different shapes cannot be stacked to a batch. Give the DataLoader a `collate_fn` that pads"
            " them, such as with `torch.nn.utils.rnn.pad_sequence`, or that returns a list."
        )
    if "has no len()" in message and frames[-1].f_globals.get("__name__") == "torch.utils.data.sampler":
        error.add_note("A data set defines `__len__`. One without a length derives from IterableDataset.")
    if "result collection is not registered" in message and not any("predict" in name for name in functions):
        error.add_note("Another run of this module ended within this one. Give that one a `copy.deepcopy(module)`.")
    monitored = re.search(r"monitor='(.*)'\)` could not find the monitored key in .*\['(.*)'\]", message)
    for near in get_close_matches(monitored[1], monitored[2].split("', '"), n=1) if monitored else ():
        error.add_note(f"Did you mean {near!r}?")
    if "NoneType" in message and any(map(_asks_for_mesh, frames)):
        error.add_note(
            "`self.device_mesh` is None: only strategy='fsdp' makes one, with several devices, for modules that cut"
            " their layers themselves: FSDPStrategy(tensor=2). Without one, leave that part of the module out."
        )


def _asks_for_mesh(frame: FrameType) -> bool:
    if "device_mesh" not in frame.f_code.co_names or not frame.f_code.co_argcount:
        return False
    # Methods, and functions that a module calls with itself.
    first_argument = frame.f_code.co_varnames[0]
    return is_a(frame.f_locals.get(first_argument), LightningModule)
