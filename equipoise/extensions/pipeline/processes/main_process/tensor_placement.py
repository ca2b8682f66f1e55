"""Record of the processes that have each parameter and buffer of a module.

A tensor that only workers use leaves the main process, and a parameter that several stages use lies in each of their
processes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.graph.stage_spec import parameters_and_buffers
from equipoise.extensions.pipeline.messaging.commands import TensorSpec

__all__ = ["TensorPlacement"]


class TensorPlacement:
    """Keys of tensors, and the processes that have them. At first the main process has all.

    All processes name a tensor by its key: its index among all parameters and buffers of the module.

    Args:
        module: The module.
        last: Number of the first stage of the main process; the workers' first stages are the numbers before.

    Attributes:
        tensors: All parameters and buffers of the module. Their indices are the keys.
        needed_here: Keys of the tensors that workers have and that the stages of the main process use as well.
        on_host: Keys of copies of parameters that lie on the host on purpose, beside other devices.

    Example:
        >>> placement = TensorPlacement(nn.Linear(2, 3), last=1)
        >>> placement.add_worker(0, [1])
        >>> placement.keys_elsewhere(), placement.has_tensor(0, 1), placement.has_tensor(1, 1)
        ([1], True, False)
    """

    def __init__(self, module: nn.Module, last: int) -> None:
        self._last = last
        self.tensors: list[Tensor] = []
        # For the identity of a tensor its key.
        self._keys: dict[int, int] = {}
        for tensor in parameters_and_buffers(module):
            identity = id(tensor)
            if identity in self._keys:
                continue
            key = len(self.tensors)
            self._keys[identity] = key
            self.tensors.append(tensor)
        self._num_own = len(self.tensors)
        # For the key of a parameter those of its copies.
        self._copies: dict[int, list[int]] = {}
        self.on_host: set[int] = set()
        # For a key the workers that have the tensor.
        self._workers_with: dict[int, list[int]] = {}
        self.needed_here: set[int] = set()

    # Keys.

    def specs(self) -> list[TensorSpec]:
        """Return the properties of all tensors."""
        specs = []
        for tensor in self.tensors:
            spec = TensorSpec(
                is_parameter=isinstance(tensor, nn.Parameter),
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                on_host=self._keys[id(tensor)] in self.on_host,
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
            key = len(self.tensors)
            self._copies.setdefault(self._keys[id(parameter)], []).append(key)
            self._keys[id(of_copy)] = key
            self.tensors.append(of_copy)
            if of_copy.device.type == "cpu" != device.type:
                self.on_host.add(key)

    def key_of(self, tensor: Tensor) -> int | None:
        """Return the key of a tensor; None if the module does not have it."""
        identity = id(tensor)
        return self._keys.get(identity)

    def keys_of_layers(self, layers: Mapping[str, Any]) -> set[int]:
        """Return the keys of the tensors of layers.

        Args:
            layers: Layers, tensors and other attributes by name; see `used_parts`.
        """
        keys: set[int] = set()
        for layer in layers.values():
            tensors = parameters_and_buffers(layer)
            for tensor in tensors:
                key = self.key_of(tensor)
                # A forward may use tensors that are not the module's.
                if key is not None:
                    keys.update((key, *self._copies.get(key, ())))
        return keys

    # Places.

    def is_elsewhere(self, key: int) -> bool:
        """Return True if only workers have a tensor."""
        if key in self.needed_here:
            return False
        return key in self._workers_with

    def has_tensor(self, stage: int, key: int) -> bool:
        """Return True if the process of a stage has a tensor."""
        if stage == self._last:
            return not self.is_elsewhere(key)
        stages = self._workers_with.get(key, [])
        return stage in stages

    def stages_with(self, key: int) -> list[int]:
        """Return the first stages of the workers that have a tensor."""
        return self._workers_with.get(key, [])

    def owner_of(self, key: int) -> int:
        """Return the first stage that has a tensor."""
        stages = self._workers_with.get(key)
        if stages is None:
            return self._last
        return stages[0]

    def keys_elsewhere(self) -> list[int]:
        """Return the keys of the tensors that only workers have."""
        keys = []
        for key in self._workers_with:
            if self.is_elsewhere(key):
                keys.append(key)
        return keys

    def keys_here_too(self) -> list[int]:
        """Return the keys of the module's tensors that workers have and whose values are in this process, too."""
        keys = []
        for key in self._workers_with:
            has_values = key in self.needed_here or not isinstance(self.tensors[key], nn.Parameter)
            # Averages of what is here are computed here alone.
            if has_values and key < self._num_own:
                keys.append(key)
        return keys

    def keys_in_workers(self) -> list[int]:
        """Return the keys of the tensors that workers have."""
        return list(self._workers_with)

    def keys_of_worker(self, stage: int) -> list[int]:
        """Return the keys of the tensors that a worker has."""
        keys = []
        for key, stages in self._workers_with.items():
            if stage in stages:
                keys.append(key)
        return keys

    def places(self) -> list[list[int]]:
        """Return the keys of the tensors of each worker, and last those that the main process needs as well."""
        places = []
        for stage in range(self._last):
            keys = self.keys_of_worker(stage)
            places.append(sorted(keys))
        places.append(sorted(self.needed_here))
        return places

    def tied_parameters(self) -> dict[int, list[int]]:
        """Return for the key of each trainable parameter of several processes the workers that have it."""
        tied = {}
        for key, stages in self._workers_with.items():
            count = len(stages)
            if key in self.needed_here:
                count += 1
            if count == 1:
                continue
            tensor = self.tensors[key]
            if tensor.requires_grad:
                tied[key] = stages
        return tied

    # Changes.

    def add_worker(self, stage: int, keys: Iterable[int]) -> None:
        """Record that a worker has received tensors."""
        for key in keys:
            stages = self._workers_with.setdefault(key, [])
            stages.append(stage)
            stages.sort()

    def need_here(self, keys: set[int]) -> None:
        """Record that the main process needs tensors."""
        self.needed_here |= keys

    def clear(self) -> None:
        """Record that the workers have dropped all tensors."""
        self._workers_with = {}
