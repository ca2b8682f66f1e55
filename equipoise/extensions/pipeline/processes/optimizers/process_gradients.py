"""Gradients of stages in several processes: sums for the parameters that they share (tied), and the norm of all."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.processes.main_process.client import StageClient
from equipoise.extensions.pipeline.processes.optimizers.local_gradients import Number
from equipoise.parallel.gradient_sums import sum_gradients

__all__ = ["gradient_norm", "sum_tied_gradients", "summed_gradients"]


def sum_tied_gradients(processes: StageClient, parameters: Sequence[nn.Parameter]) -> None:
    """Give every process the gradients of tied parameters, summed in the order of the stages.

    Args:
        processes: The workers.
        parameters: Parameters of which the tied ones are summed.
    """
    # 1. Find the tied parameters.
    commands = processes.commands
    placement = processes.placement
    tied = placement.tied_parameters(map(placement.key_of, parameters))
    if not tied:
        return

    # 2. Sum their gradients, and give each worker its sums.
    totals = summed_gradients(processes, [placement.tensors[key] for key in tied])
    sums = dict(zip(tied, totals, strict=True))
    for stage in range(commands.last):
        sums_of_stage = {key: sums[key] for key in tied if key in placement.keys_of_workers[stage]}
        if sums_of_stage:
            commands.send_command(stage, "tensors.set_gradients", sums_of_stage)

    # 3. Set the gradients of this process. The sums are about to be sent, so they must not change.
    for key, total in sums.items():
        if placement.is_elsewhere(key):
            continue
        gradient = None
        if total is not None:
            gradient = total.clone()
        placement.tensors[key].grad = gradient
    commands.messenger.flush()


def summed_gradients(processes: StageClient, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradient of each parameter, summed over the processes. The processes keep theirs.

    Args:
        processes: The workers.
        parameters: The parameters.
    """
    # 1. Fetch the gradients of each worker.
    commands = processes.commands
    placement = processes.placement
    needed = set(map(placement.key_of, parameters))
    requests = {}
    for stage in range(commands.last):
        keys = [key for key in sorted(placement.keys_of_workers[stage]) if key in needed]
        if keys:
            requests[stage] = ("tensors.gradients_of", keys)
    gradients_of_stages = commands.request(requests)

    # 2. Add those of this process, which has the last stage.
    sums = []
    for parameter in parameters:
        key = placement.key_of(parameter)
        gradients = [gradients_of_stage.get(key) for gradients_of_stage in gradients_of_stages.values()]
        sums.append(sum_gradients([*gradients, parameter.grad], parameter.device))
    return sums


def gradient_norm(processes: StageClient, index: Number, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients of an optimiser.

    The norms of single gradients are reduced in the order of the parameters, as on one device.

    Args:
        processes: The workers.
        index: Number by which the workers know the optimiser.
        parameters: The parameters of the optimiser.
    """
    # 1. Fetch the norms of the workers' gradients.
    norms_of_workers: dict[int | None, Tensor] = {}
    for norms_of_worker in processes.commands.request_all("optimizers.norms", index):
        norms_of_workers |= norms_of_worker

    # 2. Put them in the order of the parameters, with those of this process.
    device = processes.commands.devices[-1]
    norms = []
    for parameter in parameters:
        norm = norms_of_workers.get(processes.placement.key_of(parameter))
        if norm is None and parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad)
        if norm is not None:
            norms.append(norm.to(device))
    # The norm of norms is that of all entries.
    return nn.utils.get_total_norm(norms)
