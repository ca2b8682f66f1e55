"""Saved tensors on the host: what a forward saves for the backward waits there until the backward needs it.

Copies travel in the stream of the computation, to and from pinned memory. The forward does not wait for them. The host
waits for a copy before it sends it back, so the host catches up with the device where the backward begins.

Torch does not notice changes in place of tensors that pass through its hooks, and would compute wrong gradients.
Tensors that stay on the device are checked here. A copy has the values of the time of the forward, which are right.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from equipoise.interop.torch.modules import versions
from equipoise.to_device import to_device

__all__ = ["Offloading"]


class _Kept(NamedTuple):
    """A tensor that stays on its device, with its version when it was saved."""

    tensor: Tensor
    version: list[int] | None

    def fetch(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: If it was changed in place.
        """
        present = versions([self.tensor])
        if present != self.version:
            shape = list(self.tensor.shape)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {shape}, saved at version {self.version}, is at version {present} now."
            )
        return self.tensor


class _Copy:
    """A copy of a tensor on the host."""

    def __init__(self, tensor: Tensor, storage: Any) -> None:
        self._device = tensor.device
        self._source = weakref.ref(storage)
        pins = tensor.device.type == "cuda"
        with torch.no_grad():
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=pins)
            self._tensor.copy_(tensor, non_blocking=pins)
        self._arrival: torch.cuda.Event | None = None
        if pins:
            self._arrival = torch.cuda.current_stream(tensor.device).record_event()

    def is_of(self, storage: Any) -> bool:
        """Return True if the copy was made from a storage. Another one may have its id, once it is freed."""
        return self._source() is storage

    def fetch(self) -> Tensor:
        """Return the tensor on its device again."""
        if self._device.type == "cpu":
            # The operation may be one that changes its saved tensor.
            return self._tensor.clone()
        if self._arrival is not None:
            self._arrival.synchronize()
        return to_device(self._tensor, self._device)


class Offloading:
    """Lets the tensors that a forward saves for its backward wait on the host.

    Parameters and buffers stay on the device, and so do views of them, tensors that are smaller than a least size, and
    tensors with several elements in one place, such as expanded ones. A tensor that several operations save is copied
    once. The numbers are the same to the bit.

    Args:
        module: The module whose parameters and buffers stay.
        device: The device whose tensors are offloaded.
        least_bytes: Bytes from which on a tensor is offloaded.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> offloading = Offloading(model, torch.device("cpu"), least_bytes=0)
        >>> with offloading.forward():
        ...     loss = model(torch.ones(2, 4)).sum()
        >>> loss.backward()
    """

    def __init__(self, module: nn.Module, device: torch.device, *, least_bytes: int) -> None:
        self._module = module
        self._device = device
        self._least_bytes = least_bytes
        # Addresses of the memory of parameters and buffers in the present forward.
        self._staying: set[int] = set()
        # Copies of the present forward by storage, place, and version.
        self._copies: weakref.WeakValueDictionary[Any, _Copy] = weakref.WeakValueDictionary()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Offload what operations in a `with` block save."""
        # Strategies may move parameters between steps.
        self._staying.clear()
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            self._staying.add(_address(tensor))
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._copies.clear()

    def _pack(self, tensor: Tensor) -> _Kept | _Copy:
        version = versions([tensor])
        if not self._is_offloaded(tensor):
            return _Kept(tensor, version)
        storage = tensor.untyped_storage()
        place = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        version_key = tuple(version or ())
        key = (id(storage), place, version_key)
        copy = self._copies.get(key)
        if copy is None or version is None or not copy.is_of(storage):
            copy = _Copy(tensor, storage)
            self._copies[key] = copy
        return copy

    def _unpack(self, packed: _Kept | _Copy) -> Tensor:
        return packed.fetch()

    def _is_offloaded(self, tensor: Tensor) -> bool:
        """Return True if a tensor is to wait on the host."""
        if tensor.device.type != self._device.type:
            return False
        is_plain = type(tensor) in (Tensor, nn.Parameter)
        if not is_plain or tensor.layout != torch.strided:
            return False
        # Nothing is gained by an empty tensor.
        least = max(1, self._least_bytes)
        if tensor.nbytes < least:
            return False
        storage = tensor.untyped_storage()
        # The elements of an expanded tensor lie in one place.
        if storage.nbytes() < tensor.nbytes:
            return False
        return _address(tensor) not in self._staying


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 for tensors without memory of their own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        # The tensor is sparse, or of a class from another library.
        return 0
