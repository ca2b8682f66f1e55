"""Positions of several processes, put together for another number of processes.

State that each process of a run has for itself is added up, and rank 0 receives it: gradients and weights of an open
accumulation window, logged values and states of metrics. The other ranks begin empty. This state is summed over the
processes where it is used, so the results are those of an undisturbed run.
"""

from typing import Any

from torch import Tensor, nn

from equipoise.interop.merged_metrics import merge_saved_states
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
    # 1. Generators, and state that the processes have in common.
    first = positions[0]
    position_here = first
    if rank < len(positions):
        position_here = positions[rank]
    # A batch that was read ahead was that of another number of processes.
    merged = {**position_here, "ahead": []}
    if rank >= len(positions):
        merged["batch_end"] = []

    # 2. State that belongs to all processes together.
    is_main = rank == 0
    merged["window"] = _window([position["window"] for position in positions], is_main=is_main)
    merged["gradients"] = []
    if is_main:
        merged["gradients"] = _sum_gradients([position["gradients"] for position in positions])
    logs = [position["logs"] for position in positions]
    entries = merge_saved_entries([logs_of_process["entries"] for logs_of_process in logs], rank)
    merged["logs"] = {"callback_metrics": logs[0]["callback_metrics"], "entries": entries}

    # 3. States of metrics. Those that the validation has logged are reset before they are used again.
    states = [position["metrics"] for position in positions]
    of_validation = first["metrics_of_validation"]
    merged["metrics"] = merge_saved_states(module, states, rank, count, left_out=of_validation)
    if first["before_validation"]:
        merged["before_validation"] = _before_validation(positions, position_here, module, rank, count)
    return merged


def _before_validation(
    positions: list[Position], position_here: Position, module: nn.Module, rank: int, count: int
) -> dict[str, Any]:
    states = [position["before_validation"]["metrics"] for position in positions]
    metrics = merge_saved_states(module, states, rank, count)
    return {**position_here["before_validation"], "metrics": metrics}


def _window(windows: list[dict[str, Any]], *, is_main: bool) -> dict[str, Any]:
    """Return the state of the accumulation window: the weights of all processes, or none."""
    reference = None
    equal = 0
    weight = 0
    for window in windows:
        # It is the same in all processes that have one.
        if reference is None:
            reference = window["reference"]
        if is_main:
            equal += window["equal"]
            weight += window["others"]
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
