"""Ray's part in this process, as Ray's own modules say where it has loaded them; Ray is never imported here.

Ray loads its modules in the processes that it starts before it calls the user's function. So a process without them is
none of Ray's.
"""

import sys
from pathlib import Path
from typing import Any

from equipoise.interop.ray import in_tune_session

__all__ = ["CHECKPOINT_FILE", "is_in_ray", "last_reported_checkpoint", "ray_train", "ray_world_size"]

# Name of the file in a reported checkpoint; Ray's own callback for Lightning uses the same one.
CHECKPOINT_FILE = "checkpoint.ckpt"


def ray_train() -> Any:
    """Return the module `ray.train` in a worker of Ray Train; None in any other process."""
    module: Any = sys.modules.get("ray.train")
    if module is None or in_tune_session():
        return None
    try:
        module.get_context()
    except RuntimeError:
        # Ray's answer outside of its workers.
        return None
    return module


def ray_world_size() -> int:
    """Return the number of workers of the Ray Train run to which this process belongs; 1 outside of one."""
    module = ray_train()
    if module is None:
        return 1
    return int(module.get_context().get_world_size())


def is_in_ray() -> bool:
    """Return True in a worker of Ray Train and in a trial of Ray Tune, which can report checkpoints."""
    return in_tune_session() or ray_train() is not None


def last_reported_checkpoint() -> str | None:
    """Return the path of the checkpoint that was reported to Ray last, for `fit(..., ckpt_path=...)`.

    Ray has one after it has restarted the workers of a run. On another machine it is downloaded first.

    Returns:
        The path of the file; None outside of Ray, and before the first report.
    """
    module: Any = ray_train()
    if module is None and in_tune_session():
        module = sys.modules["ray.tune"]
    if module is None:
        return None
    checkpoint = module.get_checkpoint()
    if checkpoint is None:
        return None
    folder = Path(checkpoint.path)
    if not folder.is_dir():
        folder = Path(checkpoint.to_directory())
    return _file_in(folder)


def _file_in(folder: Path) -> str | None:
    """Return the checkpoint in a folder: the file or sharded checkpoint of the usual name, else the only file."""
    usual = folder / CHECKPOINT_FILE
    if usual.exists():
        return str(usual)
    files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    if len(files) == 1:
        return str(files[0])
    return None
