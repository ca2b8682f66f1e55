"""Results of micro-batches: without their graphs, and their outputs in the order of the data."""

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from equipoise.parallel.batches.weighting import Weight
from equipoise.parallel.step_protocols import PartialOutputs, StepResult

__all__ = ["detached", "outputs_in_order"]


def detached(result: Any) -> StepResult:
    """Return a result without its graph."""
    loss = result.loss
    if loss is not None:
        loss = loss.detach()
    outputs = result.outputs
    if isinstance(outputs, PartialOutputs):
        without_graphs = [apply_to_collection(output, Tensor, Tensor.detach) for output in outputs.outputs]
        return StepResult(loss, result.weight, replace(outputs, outputs=without_graphs))
    return StepResult(loss, result.weight, apply_to_collection(outputs, Tensor, Tensor.detach))


def outputs_in_order(
    micro_batches: Sequence[Any], results: Sequence[StepResult], sizes: Sequence[int], device: torch.device, dim: int
) -> PartialOutputs:
    """Return the outputs of micro-batches in the order of the data. Each micro-batch has samples of every device."""
    # 1. The outputs of all parts. Where a strategy computes on several devices, it has noted the device of each part.
    entries: list[tuple[int, Any, int, Weight]] = []
    for micro_batch, result, size in zip(micro_batches, results, sizes, strict=True):
        outputs = result.outputs
        if isinstance(outputs, PartialOutputs):
            entries += zip(micro_batch.indices, outputs.outputs, outputs.sizes, outputs.weights, strict=True)
        else:
            weight = 1 if result.weight is None else result.weight
            entries.append((0, outputs, size, weight))

    # 2. A batch is split over the devices first, so its first samples are those of the first device.
    entries.sort(key=itemgetter(0))
    _, in_order, sizes_in_order, weights = zip(*entries, strict=True)
    partial_outputs = PartialOutputs(in_order, sizes_in_order, device, dim, weights)
    partial_outputs.check()
    return partial_outputs
