"""Record of the processes that have each parameter and buffer of a module.

A tensor that only workers use leaves the main process, and a parameter that several stages use lies in each of their
processes.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.pipeline.graph.stage_spec import parameters_and_buffers
from equipoise.extensions.pipeline.messaging.commands import TensorSpec

__all__ = ["TensorPlacement"]

T = TypeVar("T", bound=Tensor)


class TensorPlacement:
    """Keys of tensors, and the processes that have them. At first the main process has all.

    All processes name a tensor by its key: its index among all parameters and buffers of the module.

    Args:
        module: The module.
        workers: Number of workers.

    Attributes:
        tensors: All parameters and buffers of the module. Their indices are the keys.
        keys_of_workers: For each worker, by its first stage, the keys of the tensors that it has.
        needed_here: Keys of the tensors that the stages of the main process use.
        on_host: Keys of copies of parameters that lie on the host on purpose, beside other devices.

    Example:
        >>> placement = TensorPlacement(nn.Linear(2, 3), workers=1)
        >>> placement.keys_of_workers[0].add(1)
        >>> placement.is_elsewhere(0), placement.is_elsewhere(1), placement.workers_with(1)
        (False, True, [0])
    """

    def __init__(self, module: nn.Module, workers: int) -> None:
        self.tensors: list[Tensor] = []
        # The key of each tensor, by the identity of the tensor.
        self._keys: dict[int, int] = {}
        for tensor in parameters_and_buffers(module):
            identity = id(tensor)
            if identity not in self._keys:
                self._add(tensor)
        self._num_own = len(self.tensors)
        # The keys of the copies of each parameter, by its key.
        self._copies: dict[int, list[int]] = {}
        self.on_host: set[int] = set()
        self.keys_of_workers: list[set[int]] = [set() for _ in range(workers)]
        self.needed_here: set[int] = set()

    # Keys.

    def _add(self, tensor: Tensor) -> int:
        """Return the key of a new tensor."""
        key = len(self.tensors)
        self._keys[id(tensor)] = key
        self.tensors.append(tensor)
        return key

    def specs(self) -> list[TensorSpec]:
        """Return the properties of all tensors."""
        specs = []
        for key, tensor in enumerate(self.tensors):
            spec = TensorSpec(
                is_parameter=isinstance(tensor, nn.Parameter),
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                on_host=key in self.on_host,
            )
            specs.append(spec)
        return specs

    def adopt(self, module: nn.Module, copied: nn.Module, device: torch.device) -> None:
        """Let the parameters of a copy of the module lie where those of the module do.

        Args:
            module: The module.
            copied: The copy, such as an average of the weights.
            device: The device of this process.
        """
        for parameter, of_copy in zip(module.parameters(), copied.parameters(), strict=True):
            key = self._add(of_copy)
            self._copies.setdefault(self._keys[id(parameter)], []).append(key)
            is_on_host = of_copy.device.type == "cpu"
            if is_on_host and device.type != "cpu":
                self.on_host.add(key)

    def key_of(self, tensor: Tensor) -> int | None:
        """Return the key of a tensor; None if the module does not have it."""
        return self._keys.get(id(tensor))

    def keys_of_layers(self, layers: Mapping[str, Any]) -> set[int]:
        """Return the keys of the tensors of layers.

        Args:
            layers: Layers, tensors and other attributes by name; see `used_parts`.
        """
        keys: set[int] = set()
        for layer in layers.values():
            for tensor in parameters_and_buffers(layer):
                key = self.key_of(tensor)
                # A forward may use tensors that are not the module's.
                if key is None and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                    raise StepError(
                        f"The network uses a parameter of shape {tuple(tensor.shape)} that its module did not have when"
                        " the run began, so no other process trains it. Make it before the run, for instance in"
                        " `configure_model`, or take engine='threads'."
                    )
                if key is not None:
                    keys.add(key)
                    keys.update(self._copies.get(key, ()))
        return keys

    # Places.

    def workers_with(self, key: int) -> list[int]:
        """Return the first stages of the workers that have a tensor; the first of them owns it."""
        stages = []
        for stage, keys in enumerate(self.keys_of_workers):
            if key in keys:
                stages.append(stage)
        return stages

    def is_elsewhere(self, key: int | None) -> bool:
        """Return True if only workers have a tensor; None is the key of one that is not the module's."""
        if key is None or key in self.needed_here:
            return False
        return any(key in keys for keys in self.keys_of_workers)

    def those_here(self, tensors: Iterable[T]) -> list[T]:
        """Return those of the tensors whose values are in this process."""
        return [tensor for tensor in tensors if not self.is_elsewhere(self.key_of(tensor))]

    def those_elsewhere(self, tensors: Iterable[T]) -> list[T]:
        """Return those of the tensors that only workers have."""
        return [tensor for tensor in tensors if self.is_elsewhere(self.key_of(tensor))]

    def keys_in_workers(self) -> set[int]:
        """Return the keys of the tensors that workers have."""
        return set().union(*self.keys_of_workers)

    def keys_elsewhere(self) -> set[int]:
        """Return the keys of the tensors that only workers have."""
        return self.keys_in_workers() - self.needed_here

    def keys_here_too(self) -> list[int]:
        """Return the keys of the module's tensors that workers have and whose values are in this process, too."""
        # Averages of what is here are computed here alone.
        keys = []
        for key in sorted(self.keys_in_workers()):
            has_values = key in self.needed_here or not isinstance(self.tensors[key], nn.Parameter)
            if has_values and key < self._num_own:
                keys.append(key)
        return keys

    def places(self) -> list[list[int]]:
        """Return the keys of the tensors of each worker, and last those that the main process needs."""
        places = [sorted(keys) for keys in self.keys_of_workers]
        places.append(sorted(self.needed_here))
        return places

    def tied_parameters(self, keys: Iterable[int | None]) -> list[int]:
        """Return those of the keys whose tensors are trainable parameters of several processes."""
        tied = []
        for key in keys:
            if key is None or not self.tensors[key].requires_grad:
                continue
            count = len(self.workers_with(key))
            if count and key in self.needed_here:
                count += 1
            if count > 1:
                tied.append(key)
        return tied
