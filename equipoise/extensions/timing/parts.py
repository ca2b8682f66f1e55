"""The parts of a step, and the calls of the loop that belong to each."""

from collections.abc import Collection
from typing import Final, Literal, NamedTuple

__all__ = [
    *("BACKWARD", "BETWEEN_STEPS", "CALLBACK", "CHECKPOINTS", "COMPUTATION", "COPYING", "DATA", "EXCHANGE", "FORWARD"),
    *("LOGGERS", "MODULE_HOOKS", "REST", "STEP", "VALIDATION", "Cell", "cell_of"),
]

DATA = "waiting for data"
COPYING = "copying batches"
FORWARD: Final = "forward"
BACKWARD = "backward"
# Forward and backward where they have no border: compiled, captured, or computed by stages.
COMPUTATION = "forward and backward"
EXCHANGE = "exchange"
STEP: Final = "optimiser"
CALLBACK = "callback"
MODULE_HOOKS = "hooks of the module"
LOGGERS = "loggers"
VALIDATION: Final = "validation"
CHECKPOINTS = "checkpoints"
REST = "everything else"

BETWEEN_STEPS = (VALIDATION, CHECKPOINTS)


class Cell(NamedTuple):
    """A sum of durations of calls.

    Attributes:
        part: The part.
        name: The callback whose hooks these are; empty for other parts.
        within: The part of the calls that contain this one; empty for those of the loop itself.
    """

    part: str
    name: str = ""
    within: Literal["", "forward", "optimiser", "validation"] = ""


_BY_ACTION = {
    "[_TrainingEpochLoop].train_dataloader_next": Cell(DATA),
    "run_training_batch": Cell(STEP),
    "validation": Cell(VALIDATION),
    "log_metrics": Cell(LOGGERS),
}
_BY_METHOD = {
    "batch_to_device": Cell(COPYING),
    "forward_backward": Cell(FORWARD, within=STEP),
    "backward": Cell(BACKWARD, within=FORWARD),
    "collect_gradients": Cell(EXCHANGE, within=FORWARD),
    "finish_gradients": Cell(EXCHANGE, within=STEP),
}
# Hooks of the training loop, with the part that contains them. Others belong to the start and the end of a run.
_HOOKS: dict[str, Literal["", "forward", "optimiser"]] = {
    "on_train_epoch_start": "",
    "on_before_batch_to_device": "",
    "on_train_batch_start": "",
    "on_before_zero_grad": FORWARD,
    "on_before_backward": FORWARD,
    "on_after_backward": FORWARD,
    "on_before_optimizer_step": STEP,
    "on_train_batch_end": "",
    "on_train_epoch_end": "",
}


def cell_of(action: str, checkpoints: Collection[str], *, in_validation: bool, by_hand: bool) -> Cell | None:
    """Return the cell to which the duration of a call is added; None if it is part of something else.

    Args:
        action: The name of the call in a profile.
        checkpoints: The names of the callbacks that save checkpoints.
        in_validation: Whether the call is one of a validation during the training.
        by_hand: Whether the user's training step runs backward and steps the optimisers.
    """
    owner, _, method = action.rpartition(".")
    kind, _, key = owner.partition("]")
    if in_validation:
        if kind == "[Callback" and key in checkpoints:
            return Cell(CHECKPOINTS, within=VALIDATION)
        return None
    if kind == "[Strategy":
        return _BY_METHOD.get(method)
    if kind not in ("[Callback", "[LightningModule"):
        return _BY_ACTION.get(action)
    within = _HOOKS.get(method)
    if within is None:
        return None
    if by_hand and within:
        within = FORWARD
    if kind == "[LightningModule":
        return Cell(MODULE_HOOKS, within=within)
    if key in checkpoints:
        return Cell(CHECKPOINTS, within=within)
    # A key may contain the arguments of the callback, and what its class was defined in.
    return Cell(CALLBACK, key.partition("{")[0].rpartition(".")[2], within)
