"""Results of micro-batches: without their graphs, and their outputs in the order of the data."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from equipoise.parallel.batches.gathering import PartialOutputs
from equipoise.parallel.batches.weighting import Weight
from equipoise.parallel.step_protocols import StepResult

__all__ = ["detached", "outputs_in_order"]


class _Output(NamedTuple):
    """The output of one part of a micro-batch."""

    device_index: int
    micro_batch: int
    output: Any
    size: int
    weight: Weight


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
    entries: list[_Output] = []
    for number, (micro_batch, result, size) in enumerate(zip(micro_batches, results, sizes, strict=True)):
        outputs = result.outputs
        if isinstance(outputs, PartialOutputs):
            parts = zip(micro_batch.indices, outputs.outputs, outputs.sizes, outputs.weights, strict=True)
            for index, output, part_size, part_weight in parts:
                entries.append(_Output(index, number, output, part_size, part_weight))
        else:
            weight = 1 if result.weight is None else result.weight
            entries.append(_Output(0, number, outputs, size, weight))

    # 2. A batch is split over the devices first, so its first samples are those of the first device.
    entries.sort(key=lambda entry: (entry.device_index, entry.micro_batch))
    in_order = PartialOutputs(
        [entry.output for entry in entries],
        [entry.size for entry in entries],
        device,
        dim,
        [entry.weight for entry in entries],
    )
    in_order.check()
    return in_order
