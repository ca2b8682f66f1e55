"""Gradients of parameters in several processes: sums for tied parameters, and the norm of all."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.pipeline.processes.client import StageClient

__all__ = ["gradient_norm", "sum_tied_gradients"]


def sum_tied_gradients(processes: StageClient, parameters: Sequence[nn.Parameter]) -> None:
    """Give every process the gradients of tied parameters, summed in the order of the stages.

    Args:
        processes: The workers.
        parameters: Parameters of which the tied ones are summed.
    """
    # 1. Find the tied parameters.
    keys = {processes.key_of(parameter) for parameter in parameters}
    tied = {}
    for key, stages in processes.tied_parameters().items():
        if key in keys:
            tied[key] = stages
    if not tied:
        return

    # 2. Fetch the gradients of each worker.
    keys_of_stages = _keys_of_stages(tied, processes.last)
    commands = {stage: ("gradients", keys) for stage, keys in keys_of_stages.items()}
    replies = processes.request(commands)

    # 3. Sum them. This process has the last stage, so its gradient comes last.
    sums: dict[int, Tensor | None] = {}
    for key, stages in tied.items():
        parameter = processes.tensors[key]
        is_here = processes.has_tensor(processes.last, key)
        gradients = [replies[stage][key] for stage in stages]
        if is_here:
            gradients.append(parameter.grad)
        total = _sum_of(gradients, parameter.device)
        sums[key] = total
        if is_here:
            # `total` is about to be sent, so it must not change.
            parameter.grad = None if total is None else total.clone()

    # 4. Return the sums.
    for stage, keys_of_stage in keys_of_stages.items():
        sums_of_stage = {key: sums[key] for key in keys_of_stage}
        processes.send_command(stage, "set_gradients", sums_of_stage)
    processes.messenger.flush()


def gradient_norm(processes: StageClient, index: int, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients of an optimiser.

    The norms of single gradients are reduced in the order of the parameters, as on one device.

    Args:
        processes: The workers.
        index: Number by which the workers know the optimiser.
        parameters: The parameters of the optimiser.
    """
    norms_of_workers: dict[int | None, Tensor] = {}
    for reply in processes.request_all("norms", index):
        norms_of_workers |= reply
    norms = []
    for parameter in parameters:
        key = processes.key_of(parameter)
        norm = norms_of_workers.get(key)
        if norm is None and parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad)
        if norm is not None:
            norms.append(norm.to(processes.devices[-1]))
    if not norms:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _keys_of_stages(tied: dict[int, list[int]], count: int) -> dict[int, list[int]]:
    """Return for each worker with tied parameters their keys.

    Args:
        tied: For the key of each tied parameter the workers that have it.
        count: Number of workers.
    """
    keys_of_stages: dict[int, list[int]] = {}
    for stage in range(count):
        keys = [key for key, stages in tied.items() if stage in stages]
        if keys:
            keys_of_stages[stage] = keys
    return keys_of_stages


def _sum_of(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    """Return the sum of gradients in their order; None if there are none."""
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is None:
            continue
        moved = gradient.to(device)
        total = moved if total is None else total + moved
    return total
