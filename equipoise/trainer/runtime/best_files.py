"""The best files of a run that goes on in another folder.

Lightning's ModelCheckpoint forgets its best values where the folder has changed, and calls a worse file the best. Here
it keeps them, with the files that the run has written before; what it does not keep any more stays in their folder.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO

from equipoise.interop.remote.paths import to_path
from equipoise.notices import rank_zero_warn
from equipoise.parallel.communication.processes import Processes
from equipoise.trainer.checkpointing.file import completion_time
from equipoise.trainer.checkpointing.reading import run_of

__all__ = ["in_present_folder", "present_place"]


def present_place(
    path: str, folder: str | None, checkpoint: str | os.PathLike[str], checkpoint_io: CheckpointIO | None = None
) -> str | None:
    """Return where a file is that the run of a checkpoint has written; None if it is gone.

    The user may have moved or copied the folder of the run, or that of all runs.

    Args:
        path: The file's path then.
        folder: The folder of the checkpoint then. None: that of the file.
        checkpoint: The checkpoint, where it is now.
        checkpoint_io: The plugin that wrote it. Default: None.
    """
    places = [path]
    # On other drives there is no path from one to the other.
    with suppress(ValueError):
        way = os.path.relpath(path, folder or os.path.dirname(path))
        beside = to_path(checkpoint).parent / way
        places.insert(0, os.path.abspath(beside) if isinstance(beside, Path) else str(beside))
    run = run_of(checkpoint, checkpoint_io)
    for place in places:
        # Another run may have written a file of that name since.
        if completion_time(place) is not None and run_of(place, checkpoint_io) == run:
            return place
    return None


def in_present_folder(
    callback: ModelCheckpoint,
    state: dict[str, Any],
    checkpoint: str | os.PathLike[str],
    checkpoint_io: CheckpointIO | None,
    processes: Processes,
) -> dict[str, Any]:
    """Return the state of a checkpoint callback as one of its present folder; called in all processes together.

    Args:
        callback: The callback, whose folder is known.
        state: Its state in a checkpoint.
        checkpoint: The checkpoint.
        checkpoint_io: The plugin that wrote it; None for none.
        processes: The processes, of which the main one looks for files.
    """
    folder = state.get("dirpath", callback.dirpath)
    if folder == callback.dirpath:
        return state

    # 1. The files, where they are now. Values may differ between processes, but not their number.
    def find(path: str) -> str | None:
        return present_place(path, folder, checkpoint, checkpoint_io) if path else None

    scores = state.get("best_k_models", {})
    best_path = state["best_model_path"]
    places: list[str | None] = []
    if processes.is_main:
        places = [find(path) for path in (best_path, *scores)]
    best_place, *places = processes.broadcast(places)
    present = {place: score for place, score in zip(places, scores.values(), strict=True) if place is not None}

    # 2. As many as this run keeps, the best first.
    ranked = sorted(present, key=lambda place: float(present[place]), reverse=callback.mode == "max")
    if callback.save_top_k > 0:
        ranked = ranked[: callback.save_top_k]
    best_models = {place: present[place] for place in ranked}
    if scores and best_place is None:
        rank_zero_warn(
            f"The best checkpoint so far, {best_path!r} with {callback.monitor}={float(state['best_model_score']):.4g},"
            " is gone: the best of this run is the best of the files that are left."
        )
    last = ranked[-1] if ranked and len(ranked) == callback.save_top_k else ""
    return {
        **state,
        "dirpath": callback.dirpath,
        "best_model_path": ranked[0] if ranked else best_place or "",
        "best_model_score": best_models[ranked[0]] if ranked else None,
        "best_k_models": best_models,
        "kth_best_model_path": last,
        "kth_value": best_models.get(last, callback.kth_value),
        "last_model_path": callback.last_model_path,
    }
