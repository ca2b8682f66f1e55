"""Positions of several processes, put together for another number of processes.

What the processes of a run have for themselves is added up, and rank 0 gets it: gradients and weights of an open
accumulation window, logged values and states of metrics. The other ranks begin empty. All of it is summed over the
processes where it is used, so the results are those of an undisturbed run.
"""

from typing import Any

from torch import Tensor, nn

from equipoise.interop.metrics import merge_saved_states
from equipoise.trainer.logging.cross_process import merge_saved_entries

__all__ = ["merged_position"]

Position = dict[str, Any]


def merged_position(positions: list[Position], module: nn.Module, rank: int, count: int) -> Position:
    """Return the position from which a process continues.

    Args:
        positions: The positions of the processes that wrote the checkpoint, in the order of ranks.
        module: The user's module, whose metrics say how their states are merged.
        rank: The rank of this process.
        count: The number of processes now.

    Raises:
        ConfigurationError: If the states of a metric cannot be merged.
    """
    # 1. Generators, and what the processes have in common.
    first = positions[0]
    position_here = first
    if rank < len(positions):
        position_here = positions[rank]
    # A batch that was read ahead was that of another number of processes.
    merged = {**position_here, "ahead": []}

    # 2. What belongs to all of them together.
    is_main = rank == 0
    merged["window"] = _window([position["window"] for position in positions], is_main=is_main)
    merged["gradients"] = []
    if is_main:
        merged["gradients"] = _sum_gradients([position["gradients"] for position in positions])
    entries = merge_saved_entries([position["logs"]["entries"] for position in positions], rank)
    merged["logs"] = {"callback_metrics": first["logs"]["callback_metrics"], "entries": entries}

    # 3. States of metrics. Those that the validation has logged are reset before they are used again.
    states = [position["metrics"] for position in positions]
    of_validation = first["metrics_of_validation"]
    merged["metrics"] = merge_saved_states(module, states, rank, count, left_out=of_validation)
    if first["before_validation"]:
        before = [position["before_validation"]["metrics"] for position in positions]
        metrics = merge_saved_states(module, before, rank, count)
        merged["before_validation"] = {**position_here["before_validation"], "metrics": metrics}
    return merged


def _window(windows: list[dict[str, Any]], *, is_main: bool) -> dict[str, Any]:
    """Return the state of the accumulation window: the weights of all processes, or none."""
    # The reference is the same in all processes that have one.
    references = [window["reference"] for window in windows if window["reference"] is not None]
    reference = references[0] if references else None
    if not is_main:
        return {"reference": reference, "equal": 0, "others": 0}
    equal = sum(window["equal"] for window in windows)
    weight = sum(window["others"] for window in windows)
    return {"reference": reference, "equal": equal, "others": weight}


def _sum_gradients(gradients_of_processes: list[list[Tensor | None]]) -> list[Tensor | None]:
    """Return the sum of the gradients of each parameter; a process outside of a window has an empty list."""
    filled = [gradients for gradients in gradients_of_processes if gradients]
    sums: list[Tensor | None] = []
    for gradients in zip(*filled, strict=True):
        total: Tensor | None = None
        for gradient in gradients:
            if total is None:
                total = gradient
            elif gradient is not None:
                total = total + gradient
        sums.append(total)
    return sums
