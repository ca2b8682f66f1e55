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
    num_further = len(checkpoint[MEMBERS])
    for position in positions:
        if position is not None:
            _set_position(position, strategy, num_further, member)
    of_member[OUR_KEY] = ours
    return of_member


def _set_position(position: dict[str, Any], strategy: dict[str, Any], num_further: int, member: int) -> None:
    """Turn the position of an ensemble into that of a member."""
    streams = strategy.get("streams")
    if member and streams is not None:
        position["random_state"]["global"]["cpu"] = streams[member - 1].clone()
    states = [
        position["random_state"],
        position["epoch_random_state"],
    ]
    # Those with which workers that stay have started.
    states.extend(state for _, state in position.get("loaders", {}).get("workers", []))
    before_validation = position.get("before_validation")
    if before_validation:
        states.append(before_validation["random_state"])
    new_states: dict[bytes, Tensor] = {}
    for state in states:
        if state:
            new_states |= _set_random_state(state, num_further, member)
    # Private generators are among what has changed in the loaders, too.
    for changes in (position, before_validation or {}):
        for name in ("hook_state", "data_before_order"):
            entries = changes.get(name, {}).get("generators", [])
            entries[:] = [[path, new_states.get(_bytes_of(state), state)] for path, state in entries]
    if member and strategy.get("gradients"):
        gradients = []
        for gradient, present in strategy["gradients"]:
            gradients.append(_row(gradient, present, member))
        position["gradients"] = gradients


def _set_random_state(state: dict[str, Any], num_further: int, member: int) -> dict[bytes, Tensor]:
    """Turn generators of loaders, among which are the streams of the members, into those of a member's own run.

    Returns:
        The new state of each private generator, by its state in the first member.
    """
    streams = [generator for generator in state["generators"] if generator.ndim == 2]
    generators = [generator for generator in state["generators"] if generator.ndim != 2]
    state["generators"] = generators
    if not streams or not member:
        return {}
    state["global"]["cpu"] = streams[0][member - 1].clone()
    # The rows of private generators of a loader follow those of the global one.
    private = [rows for of_loader in streams for rows in of_loader.split(num_further)[1:]]
    if len(private) > len(generators):
        # Loaders that share a generator have the same rows.
        private = list({_bytes_of(rows): rows for rows in private}.values())
    # An earlier version wrote rows of a private generator in any case.
    pairs = list(zip(generators, private, strict=False))
    state["generators"] = [rows[member - 1].clone() for _, rows in pairs]
    return {_bytes_of(generator): rows[member - 1].clone() for generator, rows in pairs}


def _bytes_of(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, Tensor) else b""


def _row(gradient: Tensor | None, present: list[int], member: int) -> Tensor | None:
    if gradient is None or member not in present:
        return None
    return gradient[member].clone()
