"""Choose the checkpoint that a path, "best", "last", "hpc" or None refers to."""

import os
import re
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.callbacks import last_checkpoints
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.remote.paths import to_path
from equipoise.notices import rank_zero_warn
from equipoise.trainer.checkpointing.file import completion_time, newest_first

if TYPE_CHECKING:
    from equipoise.trainer.state.run_state import RunState

__all__ = ["select_checkpoint"]

# Files of interrupted jobs: ours with job, task of an array and number of the fit, and Lightning's with their number.
_OURS = re.compile(r"slurm-\d+(?:_(\d+))?(?:-fit-(\d+))?\.ckpt")
_LIGHTNINGS = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


def select_checkpoint(state: "RunState", trainer: object, ckpt_path: Any, *, module_given: bool) -> Any:
    """Return the path that `ckpt_path` stands for; None for no checkpoint.

    Args:
        state: Contains the checkpoint callbacks, which know the best and the last.
        trainer: The first argument of the callbacks' methods.
        ckpt_path: A path, "best", "last", "hpc" or None.
        module_given: Whether a module was passed. If not, None means the best checkpoint of the last fit.

    Raises:
        ConfigurationError: If there is no such checkpoint.
    """
    entry_point = "fit" if state.status.fn is None else state.status.fn.value

    # 1. None: the choice of the trainer.
    if ckpt_path is None:
        if state.managed_ckpt_path is not None:
            return state.managed_ckpt_path
        if module_given:
            _announce_checkpoint_of_error(state)
            return None
        rank_zero_warn(
            f"`{entry_point}` was called without a module: the best checkpoint of the last fit is used. Say so with"
            " ckpt_path='best'."
        )
        ckpt_path = "best"

    # 2. A path.
    if not isinstance(ckpt_path, str | os.PathLike) or not os.fspath(ckpt_path):
        raise ConfigurationError(f"ckpt_path must be a path, 'best', 'last', 'hpc' or None, not {ckpt_path!r}.")

    # 3. The path of a word.
    if ckpt_path == "best":
        return _best(state, entry_point)
    if ckpt_path == "last":
        return _last(state, trainer, entry_point)
    if ckpt_path == "hpc":
        return _of_interrupted_job(state, entry_point)
    return ckpt_path


def _announce_checkpoint_of_error(state: "RunState") -> None:
    """Say that a fit begins anew beside the checkpoint of an earlier error, from which Lightning would continue."""
    for callback in state.callbacks:
        if not state.fitting or not is_a(callback, OnExceptionCheckpoint):
            continue
        if completion_time(callback.ckpt_path) is not None:
            rank_zero_info(
                f"The fit begins anew beside {callback.ckpt_path}, which an earlier error has left: ckpt_path='last'"
                " continues from it. OnExceptionCheckpoint removes it when a run ends without an error."
            )


def _best(state: "RunState", entry_point: str) -> str:
    """Return the best checkpoint of the first checkpoint callback, of those that monitor a value if there are any."""
    callbacks = [callback for callback in state.callbacks if is_a(callback, Checkpoint)]
    if not callbacks:
        raise ConfigurationError(
            f"`{entry_point}(ckpt_path='best')` needs a ModelCheckpoint among the callbacks, but there is none. Give a"
            f" path, or pass the module, `{entry_point}(module)`, to use the weights that it has."
        )
    # Without a value to monitor there is no best, but the last file.
    callbacks = [callback for callback in callbacks if getattr(callback, "monitor", None) is not None] or callbacks
    callback = callbacks[0]
    if len(callbacks) > 1:
        rank_zero_warn(
            f"`{entry_point}(ckpt_path='best')`: {len(callbacks)} callbacks save checkpoints. The best of the first is"
            f" used, which monitors {getattr(callback, 'monitor', None)!r}. Give a path for another."
        )
    path = getattr(callback, "best_model_path", "")
    if path:
        return str(path)
    reason = " With fast_dev_run nothing is saved." if state.fast_dev_run else ""
    raise ConfigurationError(
        f"`{entry_point}(ckpt_path='best')`: no checkpoint was saved yet.{reason} Give a path, or fit first."
    )


def _of_interrupted_job(state: "RunState", entry_point: str) -> str:
    """Return the newest checkpoint that an interrupted job of Slurm has left in `default_root_dir`.

    Of Lightning's files it is that with the highest number. Of a fit it is one of a fit with the same number, and in an
    array of jobs one of the same task.
    """
    folder = to_path(state.default_root_dir)
    paths: list[Any] = list(folder.iterdir()) if folder.is_dir() else []
    # 1. Our files, and the last one of Lightning's.
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    candidates: list[str] = []
    of_lightning: dict[int, str] = {}
    for path in paths:
        ours = _OURS.fullmatch(path.name)
        if ours is not None:
            is_of_fit = not state.fitting or int(ours[2] or 1) == state.number_of_fit
            if is_of_fit and (task is None or ours[1] == task):
                candidates.append(str(path))
        lightnings = _LIGHTNINGS.fullmatch(path.name)
        if lightnings is not None:
            of_lightning[int(lightnings[1])] = str(path)
    if of_lightning:
        candidates.append(of_lightning[max(of_lightning)])
    # 2. The newest of them.
    for newest in newest_first(candidates):
        return newest
    raise ConfigurationError(
        f"`{entry_point}(ckpt_path='hpc')`: there is no checkpoint of an interrupted job in {state.default_root_dir},"
        " neither slurm-JOB.ckpt nor Lightning's hpc_ckpt_N.ckpt. Give a path, or the default_root_dir of that job."
    )


def _last(state: "RunState", trainer: object, entry_point: str) -> str | None:
    """Return Ray's last checkpoint, or the newest of the last ones of all callbacks; None if there is none."""
    from equipoise.parallel.ray_context import is_in_ray, last_reported_checkpoint

    # 0. Ray has started the workers of this run anew.
    reported = last_reported_checkpoint()
    if reported is not None:
        return reported

    # 1. The paths that callbacks write.
    paths: set[str] = set()
    for callback in state.callbacks:
        if is_a(callback, ModelCheckpoint):
            paths |= last_checkpoints(callback, trainer)
        elif is_a(callback, OnExceptionCheckpoint):
            paths.add(str(callback.ckpt_path))

    # 2. No file is no error: a script may choose "last" for its first fit as well.
    existing = newest_first(paths)
    if not existing and not is_in_ray():
        rank_zero_warn(
            f"`{entry_point}(ckpt_path='last')`: there is no last checkpoint yet, so the module's present weights are"
            " used. ModelCheckpoint(dirpath=FOLDER, save_last=True) writes one where the next program looks."
        )
    return existing[0] if existing else None
