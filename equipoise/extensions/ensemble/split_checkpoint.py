"""A checkpoint of an ensemble, divided into one for each member, which any strategy loads and resumes."""

import copy
import os
from typing import Any

from torch import Tensor

from equipoise.errors import CheckpointError
from equipoise.extensions.ensemble.portable_state import MEMBERS
from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.trainer.checkpointing.file import OUR_KEY, write_checkpoint
from equipoise.trainer.checkpointing.reading import load_checkpoint

__all__ = ["split_ensemble"]


def split_ensemble(
    path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None, *, weights_only: bool | None = None
) -> list[AnyPath]:
    """Write a checkpoint for each member of an ensemble.

    Each is that of the member's own run: with its weights, optimiser, and random numbers. `load_from_checkpoint` and
    `ckpt_path` take it, under any strategy.

    Args:
        path: A checkpoint of a run with `EnsembleStrategy`.
        folder: The folder of the new files, which is made if it does not exist. Default: that of the checkpoint.
        weights_only: See `Trainer.fit`; False for a checkpoint that holds objects, such as hyperparameters of classes.
            Default: None.

    Returns:
        The paths of the files, in the order of the members: `NAME-member_0.ckpt` and so on.

    Raises:
        CheckpointError: If the file cannot be read, or is not that of an ensemble.

    Example:
        >>> split_ensemble("best.ckpt")  # doctest: +SKIP
        [PosixPath('best-member_0.ckpt'), PosixPath('best-member_1.ckpt')]
    """
    path = to_path(path)
    checkpoint = load_checkpoint(path, weights_only=weights_only, fitting=False)
    if not isinstance(checkpoint.get(MEMBERS), list):
        raise CheckpointError(f"{os.fspath(path)!r} holds one model. Take a checkpoint of a run with EnsembleStrategy.")
    target = path.parent
    if folder is not None:
        target = to_path(folder)
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    for member in range(len(checkpoint[MEMBERS]) + 1):
        file = target / f"{path.stem}-member_{member}{path.suffix}"
        write_checkpoint(_of_member(checkpoint, member), file)
        paths.append(file)
    return paths


def _of_member(checkpoint: dict[str, Any], member: int) -> dict[str, Any]:
    # 1. The weights.
    of_member = {key: value for key, value in checkpoint.items() if key != MEMBERS}
    if member:
        of_member["state_dict"] = checkpoint[MEMBERS][member - 1]
    ours = checkpoint.get(OUR_KEY)
    if ours is None:
        return of_member

    # 2. The optimisers, and the position in the epoch.
    ours = copy.deepcopy(ours)
    strategy = ours.get("strategy", {})
    ours["strategy"] = {}
    if member and strategy.get("optimizers"):
        of_member["optimizer_states"] = [states[member - 1] for states in strategy["optimizers"]]
    positions = [ours.get("position"), *ours.get("left", {}).get("positions", [])]
    for position in positions:
        if position is not None:
            _set_position(position, strategy, member)
    of_member[OUR_KEY] = ours
    return of_member


def _set_position(position: dict[str, Any], strategy: dict[str, Any], member: int) -> None:
    """Turn the position of an ensemble into that of a member."""
    streams = strategy.get("streams")
    if member and streams is not None:
        position["random_state"]["global"]["cpu"] = streams[member - 1].clone()
    states = [
        position["random_state"],
        position["epoch_random_state"],
    ]
    before_validation = position.get("before_validation")
    if before_validation:
        states.append(before_validation["random_state"])
    for state in states:
        if state:
            _set_random_state(state, member)
    if member and strategy.get("gradients"):
        gradients = []
        for gradient, present in strategy["gradients"]:
            gradients.append(_row(gradient, present, member))
        position["gradients"] = gradients


def _set_random_state(state: dict[str, Any], member: int) -> None:
    """Turn generators of loaders, among which are the streams of the members, into those of a member's own run."""
    generators = []
    streams = None
    for generator in state["generators"]:
        if generator.ndim == 2:
            streams = generator
        else:
            generators.append(generator)
    state["generators"] = generators
    if streams is None or not member:
        return
    state["global"]["cpu"] = streams[member - 1].clone()
    # The rows of a private generator of the loader follow those of the global one.
    half = len(streams) // 2
    if generators:
        state["generators"] = [streams[half + member - 1].clone()]


def _row(gradient: Tensor | None, present: list[int], member: int) -> Tensor | None:
    if gradient is None or member not in present:
        return None
    return gradient[member].clone()
