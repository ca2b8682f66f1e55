"""Gradients of stages in several processes: sums for the parameters that they share (tied), and the norm of all."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.processes.main_process.client import StageClient
from equipoise.extensions.pipeline.processes.main_process.tensor_placement import TensorPlacement
from equipoise.parallel.gradient_sums import sum_gradients

__all__ = ["gradient_norm", "sum_tied_gradients", "summed_gradients"]


def sum_tied_gradients(
    processes: StageClient,
    parameters: Sequence[nn.Parameter],
) -> None:
    """Give every process the gradients of tied parameters, summed in the order of the stages.

    Args:
        processes: The workers.
        parameters: Parameters of which the tied ones are summed.
    """
    # 1. Find the tied parameters.
    commands = processes.commands
    tied = _tied_among(parameters, processes.placement)
    if not tied:
        return

    # 2. Fetch the gradients of each worker.
    keys_of_stages = _keys_of_stages(tied, commands.last)
    requests = {}
    for stage, keys in keys_of_stages.items():
        requests[stage] = ("gradients", keys)
    gradients_of_stages = commands.request(requests)

    # 3. Sum them.
    sums: dict[int, Tensor | None] = {}
    for key, stages in tied.items():
        gradients = [gradients_of_stages[stage][key] for stage in stages]
        sums[key] = _sum_with_main(key, gradients, processes.placement)

    # 4. Return the sums.
    for stage, keys in keys_of_stages.items():
        sums_of_stage = {key: sums[key] for key in keys}
        commands.send_command(stage, "set_gradients", sums_of_stage)
    commands.messenger.flush()


def summed_gradients(processes: StageClient, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Return the gradient of each parameter, summed over the processes. The processes keep theirs.

    Args:
        processes: The workers.
        parameters: The parameters.
    """
    # 1. Fetch the gradients of each worker.
    commands = processes.commands
    placement = processes.placement
    requests = {stage: ("gradients", placement.keys_of_worker(stage)) for stage in range(commands.last)}
    gradients_of_stages = commands.request(requests)

    # 2. Add those of this process, which has the last stage.
    sums = []
    for parameter in parameters:
        key = placement.key_of(parameter)
        gradients = [gradients_of_stage.get(key) for gradients_of_stage in gradients_of_stages.values()]
        sums.append(sum_gradients([*gradients, parameter.grad], parameter.device))
    return sums


def gradient_norm(
    processes: StageClient,
    index: int,
    parameters: Sequence[nn.Parameter],
) -> Tensor:
    """Return the norm of all gradients of an optimiser.

    The norms of single gradients are reduced in the order of the parameters, as on one device.

    Args:
        processes: The workers.
        index: Number by which the workers know the optimiser.
        parameters: The parameters of the optimiser.
    """
    # 1. Fetch the norms of the workers' gradients.
    commands = processes.commands
    norms_of_workers: dict[int | None, Tensor] = {}
    for norms_of_worker in commands.request_all("norms", index):
        norms_of_workers |= norms_of_worker

    # 2. Put them in the order of the parameters, with those of this process.
    device = commands.devices[-1]
    norms = []
    for parameter in parameters:
        key = processes.placement.key_of(parameter)
        norm = norms_of_workers.get(key)
        if norm is None and parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad)
        if norm is not None:
            norm_here = norm.to(device)
            norms.append(norm_here)

    # 3. Reduce them.
    if not norms:
        return torch.zeros(())
    stacked_norms = torch.stack(norms)
    total: Tensor = torch.linalg.vector_norm(stacked_norms)
    return total


def _tied_among(
    parameters: Sequence[nn.Parameter],
    placement: TensorPlacement,
) -> dict[int, list[int]]:
    """Return for the key of each tied parameter among some the workers that have it."""
    keys = set()
    for parameter in parameters:
        key = placement.key_of(parameter)
        keys.add(key)
    tied = {}
    for key, stages in placement.tied_parameters().items():
        if key in keys:
            tied[key] = stages
    return tied


def _keys_of_stages(tied: dict[int, list[int]], count: int) -> dict[int, list[int]]:
    """Return for each worker with tied parameters their keys.

    Args:
        tied: For the key of each tied parameter the workers that have it.
        count: Number of workers.
    """
    keys_of_stages: dict[int, list[int]] = {}
    for stage in range(count):
        keys = []
        for key, stages in tied.items():
            if stage in stages:
                keys.append(key)
        if keys:
            keys_of_stages[stage] = keys
    return keys_of_stages


def _sum_with_main(
    key: int,
    gradients: Sequence[Tensor | None],
    placement: TensorPlacement,
) -> Tensor | None:
    """Return the sum of a parameter's gradients in all processes; if this process has the parameter, set its gradient.

    Args:
        key: Key of the parameter.
        gradients: Gradients of the workers, in the order of their stages.
        placement: The processes that have each tensor.
    """
    parameter = placement.tensors[key]
    if placement.is_elsewhere(key):
        return sum_gradients(gradients, parameter.device)
    # This process has the last stage, so its gradient comes last.
    all_gradients = [*gradients, parameter.grad]
    total = sum_gradients(all_gradients, parameter.device)
    gradient = None
    if total is not None:
        # `total` is about to be sent, so it must not change.
        gradient = total.clone()
    parameter.grad = gradient
    return total
