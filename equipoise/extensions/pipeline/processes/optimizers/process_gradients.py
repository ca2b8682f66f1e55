"""Gradients of stages in several processes: sums for the parameters that they share (tied), and the norm of all."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.processes.main_process.client import StageClient
from equipoise.extensions.pipeline.processes.optimizers.local_gradients import Number
from equipoise.parallel.gradient_sums import sum_gradients

__all__ = ["collect_gradients", "gradient_norm", "share_gradients", "sum_tied_gradients", "summed_gradients"]


def collect_gradients(processes: StageClient, parameters: Sequence[nn.Parameter]) -> None:
    """Move the gradients of tied parameters to this process, if it has the parameters: the user sees and changes them.

    Args:
        processes: The workers.
        parameters: Parameters of which the tied ones are summed, in the order of the stages.
    """
    placement = processes.placement
    tied = [key for key in placement.tied_parameters(map(placement.key_of, parameters)) if key in placement.needed_here]
    totals = summed_gradients(processes, [placement.tensors[key] for key in tied]) if tied else []
    for key, total in zip(tied, totals, strict=True):
        placement.tensors[key].grad = total
    _set_gradients(processes, dict.fromkeys(tied))


def share_gradients(processes: StageClient, parameters: Sequence[nn.Parameter]) -> None:
    """Give the workers the gradients that `collect_gradients` has moved, as they are now, for their optimisers."""
    placement = processes.placement
    tied = placement.tied_parameters(map(placement.key_of, parameters))
    _set_gradients(processes, {key: placement.tensors[key].grad for key in tied if key in placement.needed_here})


def sum_tied_gradients(processes: StageClient, parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients of tied parameters: in this process, or else in all that have the parameter.

    Args:
        processes: The workers.
        parameters: Parameters of which the tied ones are summed, in the order of the stages.
    """
    collect_gradients(processes, parameters)
    placement = processes.placement
    tied = list(filter(placement.is_elsewhere, placement.tied_parameters(map(placement.key_of, parameters))))
    if tied:
        totals = summed_gradients(processes, [placement.tensors[key] for key in tied])
        _set_gradients(processes, dict(zip(tied, totals, strict=True)))


def _set_gradients(processes: StageClient, gradients: Mapping[int, Tensor | None]) -> None:
    """Set gradients in all workers that have the parameters."""
    for stage, keys in enumerate(processes.placement.keys_of_workers):
        gradients_of_stage = {key: gradient for key, gradient in gradients.items() if key in keys}
        if gradients_of_stage:
            processes.commands.send_command(stage, "tensors.set_gradients", gradients_of_stage)
    # What is sent must not change before.
    processes.commands.messenger.flush()


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
    placement = processes.placement
    norms = []
    for parameter in parameters:
        key = placement.key_of(parameter)
        # This process has the whole gradient of tied parameters.
        norm = None if parameter.grad is None else torch.linalg.vector_norm(parameter.grad)
        if placement.is_elsewhere(key):
            norm = norms_of_workers.get(key)
        if norm is not None:
            norms.append(norm.to(device))
    # The norm of norms is that of all entries.
    return nn.utils.get_total_norm(norms)
