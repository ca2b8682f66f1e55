"""Exchange between the replicas of a pipeline, seen from a main process: gradients, weights of windows, and buffers.

The processes with the same stages of all replicas exchange their gradients with one another. So all replicas must have
each tensor in the processes of the same stages. A tensor moves to the process of a stage when a call uses it there, and
replicas may make different calls. So they agree on the places before each exchange.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.extensions.pipeline.execution.placement import move
from equipoise.extensions.pipeline.processes.optimizers.backend import ProcessBackend
from equipoise.extensions.pipeline.processes.optimizers.local_gradients import ReplicaSums, scale_gradients
from equipoise.parallel.batches.weighting import AccumulationWindow, Weight
from equipoise.parallel.communication.object_exchange import gather_objects
from equipoise.parallel.communication.process_group import host_group
from equipoise.parallel.communication.tensor_copies import copy_from_first
from equipoise.parallel.divergence.digests import digests_of, has_digest
from equipoise.parallel.divergence.replicated import Replicated, unchanging_buffers
from equipoise.parallel.optimizer_parameters import optimizer_parameters

__all__ = ["ReplicaExchange"]


class ReplicaExchange:
    """Exchanges values with the main processes of other replicas, and lets the workers do the same.

    Args:
        backend: Optimisers of this replica.
        module: The user's module.
    """

    def __init__(self, backend: ProcessBackend, module: nn.Module) -> None:
        self._module = module
        self._backend = backend
        self._processes = backend.processes
        self._sums = ReplicaSums()
        # The places of all tensors when the replicas agreed on them last.
        self._agreed_places: list[list[int]] | None = None

    def finish(self, window: AccumulationWindow, optimizer: Optimizer) -> bool:
        """Turn the gradients of a window into their weighted mean over all replicas.

        Args:
            window: The window of this replica.
            optimizer: The optimiser.

        Returns:
            True if Σw of all replicas is 0. Then no parameter keeps a gradient.
        """
        # 1. Exchange weights and gradients.
        total = self._total_weight(window.total)
        self._sum_gradients(optimizer)
        if not total:
            self._processes.commands.send_to_all("tensors.clear_gradients")
            optimizer.zero_grad()
            return True

        # 2. Sum those of tied parameters, and scale all.
        factor = window.correction(total)
        self._backend.finish_gradients(optimizer, factor)
        if factor is not None:
            scale_gradients(self._processes.placement.those_here(optimizer_parameters(optimizer)), factor)
        return False

    def _total_weight(self, weight: Weight) -> float:
        """Return Σw of a window over all replicas, and let all of them have their tensors in the same processes."""
        has_moved = self._processes.placement.places() != self._agreed_places
        values = torch.tensor([float(weight), float(has_moved)], dtype=torch.float64)
        dist.all_reduce(values, group=host_group())
        total, number_of_moved = values.tolist()
        if number_of_moved:
            self._agree_on_places()
        return float(total)

    def _agree_on_places(self) -> None:
        """Move tensors to the processes that have them in other replicas."""
        placement = self._processes.placement
        places_of_replicas = gather_objects(placement.places())
        union: list[set[int]] = [set() for _ in placement.places()]
        for places in places_of_replicas:
            for keys, keys_of_process in zip(union, places, strict=True):
                keys.update(keys_of_process)
        self._processes.transfer.move(union)
        # Gradients are exchanged between devices of the same type.
        device = self._processes.commands.devices[-1]
        for key, tensor in enumerate(placement.tensors):
            if not placement.is_elsewhere(key):
                move(tensor, device)
        self._agreed_places = placement.places()

    def _sum_gradients(self, optimizer: Optimizer) -> None:
        """Sum the gradients of an optimiser over all replicas, stage by stage."""
        # A replica without a batch has not sent its workers which parameters are frozen.
        self._processes.transfer.send_trainable()
        index = self._backend.optimizers.send_if_changed(optimizer)
        commands = self._processes.commands
        commands.send_to_all("optimizers.sum_gradients", index)
        commands.messenger.flush()
        self._sums.sum(self._processes.placement.those_here(optimizer_parameters(optimizer)))

    def copy_buffers(self) -> None:
        """Give all replicas the buffers of the first."""
        self._agree_on_places()
        commands = self._processes.commands
        commands.send_to_all("copy_buffers")
        commands.messenger.flush()
        # A step may have replaced some buffers by other tensors.
        copy_from_first(self._processes.placement.those_here(self._module.buffers()))

    def replicated(self) -> Replicated:
        """Return the tensors of this replica, for comparison with others; digests stand for those of workers.

        A parameter is a part for each process that has it: replicas may have it in the processes of other stages.
        """
        of_workers = self._processes.commands.request_all("tensors.digests")
        placement = self._processes.placement
        parameters: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._module.named_parameters():
            key = placement.key_of(parameter)
            if not placement.is_elsewhere(key):
                parameters[f"{name} in the last stage"] = {name: parameter}
            for stage, (kind, digests) in enumerate(of_workers):
                if key in digests:
                    parameters[f"{name} in stage {stage} on {kind}"] = {name: digests[key]}

        # Before and after a buffer moves to a worker its digest stands for it.
        buffers: dict[str, Tensor] = {}
        for name, buffer in unchanging_buffers(self._module).items():
            key = placement.key_of(buffer)
            if key is not None and placement.is_elsewhere(key):
                _, digests = of_workers[placement.workers_with(key)[0]]
                buffers[name] = digests[key]
            elif has_digest(buffer):
                (buffers[name],) = digests_of([buffer])
        return Replicated(parameters, buffers)
