"""Parameters and buffers of a worker, by the keys under which all processes of a pipeline know them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.messaging.commands import TensorSpec, placeholder
from equipoise.extensions.pipeline.messaging.remote_operations import Operation, compute_operations
from equipoise.parallel.divergence.digests import digests_of, has_digest
from equipoise.parallel.divergence.replica_check import kind_of

__all__ = ["TensorStore"]


class TensorStore:
    """Tensors of a module, of which some have values in this process.

    Args:
        specs: Properties of all tensors of the module. Their indices are the keys.
        device: Device of the values.

    Attributes:
        present: Keys of the tensors whose values have arrived.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        device: torch.device,
    ) -> None:
        self._specs = list(specs)
        self._device = device
        self._tensors: dict[int, Tensor] = {}
        self._results: dict[int, Tensor] = {}
        self.present: set[int] = set()

    def __getitem__(self, key: int) -> Tensor:
        """Return a tensor; a placeholder as long as its values have not arrived."""
        if key not in self._tensors:
            spec = self._specs[key]
            tensor = placeholder(spec.shape, spec.dtype)
            if spec.is_parameter:
                tensor = nn.Parameter(tensor, requires_grad=False)
            self._tensors[key] = tensor
        return self._tensors[key]

    def load(self, values: Mapping[int, Tensor], trainable: Mapping[int, bool]) -> None:
        """Set the values of tensors, and whether they are trainable."""
        for key, value in values.items():
            self.set_values(key, value)
        self.present.update(values)
        self.set_trainable(trainable)

    def set_values(self, key: int, values: Tensor) -> None:
        """Set the values of a tensor, which stays the same object."""
        # Layers and optimisers refer to the tensor, so it is not replaced.
        device = self._device
        if self._specs[key].on_host:
            device = torch.device("cpu")
        self[key].data = values.detach().to(device)

    def compute(self, operations: Sequence[Operation]) -> None:
        """Compute operations of a callback with the tensors; see `RemoteOperations`."""
        compute_operations(operations, self.__getitem__, self._results, self._device)

    def set_trainable(self, trainable: Mapping[int, bool]) -> None:
        """Freeze and unfreeze parameters."""
        for key, is_trainable in trainable.items():
            # Placeholders become trainable when their values arrive.
            if key in self.present:
                self[key].requires_grad_(is_trainable)

    def values_of(self, keys: Sequence[int]) -> dict[int, Tensor]:
        """Return the values of tensors."""
        values = {}
        for key in keys:
            values[key] = self[key].detach()
        return values

    def digests(self) -> tuple[str, dict[int, Tensor]]:
        """Return the kind of the device, and the digests of all tensors in this process; see `ReplicaCheck`."""
        digests = {}
        for key in sorted(self.present):
            if has_digest(self[key]):
                # By itself: the digest of a tensor depends on those before it.
                (digests[key],) = digests_of([self[key]])
        return kind_of(self._device), digests

    def keys_by_identity(self) -> dict[int, int]:
        """Return the keys of all tensors used so far by the tensors' `id`."""
        keys = {}
        for key, tensor in self._tensors.items():
            keys[id(tensor)] = key
        return keys

    def buffers(self) -> dict[int, Tensor]:
        """Return all buffers in this process, in the order of their keys."""
        buffers = {}
        for key in sorted(self.present):
            if not self._specs[key].is_parameter:
                buffers[key] = self[key]
        return buffers

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        self.set_gradients(dict.fromkeys(self.present))

    def gradients_of(self, keys: Sequence[int]) -> dict[int, Tensor | None]:
        """Return the gradients of parameters."""
        gradients = {}
        for key in keys:
            gradients[key] = self[key].grad
        return gradients

    def set_gradients(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Set the gradients of parameters; None: there is no gradient."""
        for key, gradient in gradients.items():
            parameter = self[key]
            if gradient is not None:
                gradient = gradient.to(self._device)
            parameter.grad = gradient
