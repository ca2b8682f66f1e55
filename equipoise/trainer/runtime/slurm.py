"""Slurm jobs that are requeued: their checkpoint, and its discovery after the restart.

A program may fit several times in one folder. Each of these fits has a file of its own, by its number: the program
calls them in the same order when Slurm starts it once more. All functions are for a process in a job.
"""

import os
import subprocess
from collections import Counter
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.parallel.communication.rank import slurm_job
from equipoise.trainer.checkpointing.file import completion_time, remove_checkpoint
from equipoise.trainer.state.run_state import RunState

__all__ = ["checkpoint_path", "count_fit", "forget_checkpoint", "interrupted_checkpoint", "requeue"]

# Number of fits that this program has begun, by their folder.
_fits: Counter[AnyPath] = Counter()


def count_fit(state: RunState) -> None:
    """Note that a run begins, before it goes to other processes."""
    if state.fitting:
        folder = _folder(state)
        _fits[folder] += 1
        state.number_of_fit = _fits[folder]


def _folder(state: RunState) -> AnyPath:
    folder = to_path(state.default_root_dir)
    return folder.absolute() if isinstance(folder, Path) else folder


def checkpoint_path(state: RunState) -> AnyPath:
    """Return where the state of an interrupted fit is saved: in `default_root_dir`, named after the job.

    The names of the second fit and later ones in a folder hold their numbers.
    """
    name = f"slurm-{slurm_job()}"
    if state.number_of_fit > 1:
        name += f"-fit-{state.number_of_fit}"
    return _folder(state) / f"{name}.ckpt"


def interrupted_checkpoint(state: RunState) -> Path | str | None:
    """Return the checkpoint from which a job continues that Slurm has started once more; None if there is none."""
    # 1. Only a fit in a job that Slurm has started again continues.
    if not state.fitting or os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return None

    # 2. The file of this fit.
    path = checkpoint_path(state)
    if completion_time(path) is not None:
        rank_zero_info(f"Slurm has started this job again: it resumes from {path}, where it was interrupted.")
        return path if isinstance(path, Path) else os.fspath(path)

    # 3. Another fit of the program may have been interrupted.
    for pattern in (f"slurm-{slurm_job()}.ckpt", f"slurm-{slurm_job()}-fit-*.ckpt"):
        for another in _folder(state).glob(pattern):
            rank_zero_info(
                f"Slurm has started this job again. Fit {state.number_of_fit} of this program in {_folder(state)}"
                f" begins as it did at first, since the interrupted one was another: {another.name}."
            )
            return None
    return None


def forget_checkpoint(state: RunState) -> None:
    """Remove the checkpoint of an earlier interruption after a fit that came to its end."""
    if state.fitting:
        remove_checkpoint(checkpoint_path(state))


def requeue() -> None:
    """Put this job back into the queue; a warning names the way out if Slurm refuses."""
    job = str(slurm_job())
    problem = ""
    try:
        process = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
        if process.returncode:
            problem = process.stderr.strip()
    except OSError as error:
        # Slurm's commands are not installed here.
        problem = str(error)
    if problem:
        rank_zero_warn(
            f"`scontrol requeue {job}` failed: {problem}. The job ends with exit code {os.EX_TEMPFAIL}. Submit it"
            " again, with the checkpoint as ckpt_path."
        )
        return
    rank_zero_info(f"Job {job} is in the queue again.")
