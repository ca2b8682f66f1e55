"""Optimisers of a worker, each for the worker's parameters of one optimiser of the main process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.extensions.pipeline.processes.optimizers.local_gradients import Number, ReplicaSums
from equipoise.extensions.pipeline.processes.workers.tensor_store import TensorStore
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.optimizers.combined_optimizer import CombinedOptimizer
from equipoise.parallel.payload.object_bytes import loads

__all__ = ["WorkerOptimizers"]


class WorkerOptimizers:
    """Optimisers by the numbers that the main process gives them.

    Args:
        tensors: The worker's tensors.
    """

    def __init__(self, tensors: TensorStore) -> None:
        self._tensors = tensors
        self._optimizers: dict[int, Optimizer] = {}
        self._replica_sums = ReplicaSums()

    def load(self, index: int, content: bytes) -> None:
        """Load an optimiser, for the parameters that are in this process.

        Args:
            index: Its number.
            content: Its class, states by parameter, groups and defaults, pickled.
        """
        # 1. Read it. The store stands for a list of tensors, of which only items are read.
        kind, states, groups, defaults = loads(content, self._tensors)  # type: ignore[arg-type]

        # 2. Leave the groups the parameters of this process.
        for group in groups:
            group["params"] = self._present_among(group["params"])

        # 3. Build it without `__init__`, whose arguments are not known.
        optimizer: Optimizer = kind.__new__(kind)
        optimizer.__setstate__({"state": {}, "param_groups": groups, "defaults": defaults})
        optimizer.load_state_dict(_state_dict_of(optimizer, states))
        self._optimizers[index] = optimizer

    def _present_among(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return those of the parameters whose values are in this process."""
        identities = set()
        for key in self._tensors.present:
            identities.add(id(self._tensors[key]))
        return [parameter for parameter in parameters if id(parameter) in identities]

    def state_of(self, index: int) -> dict[int, Any]:
        """Return an optimiser's states by the keys of parameters."""
        optimizer = self._optimizers.get(index)
        if optimizer is None:
            return {}
        states = {}
        for key in sorted(self._tensors.present):
            state = optimizer.state.get(self._tensors[key])
            if state is not None:
                states[key] = dict(state)
        return states

    def _of(self, index: Number) -> Optimizer:
        if isinstance(index, tuple):
            return CombinedOptimizer([self._optimizers[number] for number in index])
        return self._optimizers[index]

    def step(
        self,
        index: Number,
        options: Sequence[dict[str, Any]],
        kwargs: dict[str, Any],
    ) -> None:
        """Step an optimiser.

        Args:
            index: Its number.
            options: Current options of each of its groups.
            kwargs: Further arguments of the step.
        """
        optimizer = self._of(index)
        # Schedulers change options in the main process only.
        pairs = zip(optimizer.param_groups, options, strict=True)
        for group, current_options in pairs:
            group.update(current_options)
        optimizer.step(**kwargs)

    # Gradients.

    def _parameters_here(self, index: Number) -> dict[int, nn.Parameter]:
        """Return the parameters of an optimiser that are in this process, by key."""
        optimizer = self._of(index)
        keys = self._tensors.keys_by_identity()
        parameters = {}
        for parameter in optimizer_parameters(optimizer):
            parameters[keys[id(parameter)]] = parameter
        # All replicas sum their gradients in the same order.
        return dict(sorted(parameters.items()))

    def _parameters_of(self, index: Number) -> dict[int, nn.Parameter]:
        """Return those parameters of an optimiser in this process that have a gradient, by key."""
        parameters = {}
        for key, parameter in self._parameters_here(index).items():
            if parameter.grad is not None:
                parameters[key] = parameter
        return parameters

    def sum_gradients(self, index: Number) -> None:
        """Sum gradients over the same stages of all replicas."""
        # All replicas have the same parameters here, also those without a gradient in this one.
        self._replica_sums.sum(list(self._parameters_here(index).values()))

    def apply(self, index: Number, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function for those parameters of an optimiser here that have a gradient."""
        return function(list(self._parameters_of(index).values()), *arguments)

    def norms(self, index: Number) -> dict[int, Tensor]:
        """Return the norm of each gradient by the key of its parameter."""
        norms = {}
        for key, parameter in self._parameters_of(index).items():
            norms[key] = torch.linalg.vector_norm(parameter.grad)
        return norms


def _state_dict_of(optimizer: Optimizer, states: Mapping[Any, Any]) -> dict[str, Any]:
    """Return states by parameter as `load_state_dict` takes them, which converts them to the parameters' dtypes."""
    state_dict = optimizer.state_dict()
    states_by_index = {}
    for index, parameter in enumerate(optimizer_parameters(optimizer)):
        if parameter in states:
            states_by_index[index] = states[parameter]
    state_dict["state"] = states_by_index
    return state_dict
