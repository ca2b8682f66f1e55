"""Measure what runs on a device: its time, the storages that it keeps for its backward, and its peak of memory."""

import time
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from equipoise.extensions.pipeline.graph.stage_spec import parameters_and_buffers
from equipoise.interop.torch.dispatch import OperationWatch, tensors_in

__all__ = ["SavedTensors", "addresses_of", "now", "peak_bytes", "saved_storages"]


def now(device: torch.device) -> float:
    """Return the time in seconds, once a device has finished all of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """Return the storage of a tensor; empty for a sparse tensor, whose parts are tensors of their own."""
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    return []


def addresses_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the storages of tensors."""
    return {storage.data_ptr() for tensor in tensors for storage in storages_of(tensor)}


def saved_storages(nbytes_by_address: dict[int, int], existing: Container[int]) -> saved_tensors_hooks:
    """Return a context that notes what autograd saves.

    Args:
        nbytes_by_address: Receives the address and the bytes of each saved storage.
        existing: Addresses of storages that do not count.
    """

    def pack(tensor: Tensor) -> Tensor:
        for storage in storages_of(tensor):
            address = storage.data_ptr()
            if address not in existing:
                nbytes_by_address[address] = storage.nbytes()
        return tensor

    return saved_tensors_hooks(pack, lambda packed: packed)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class SavedTensors:
    """Number the storages of activations, so that what two calls save counts for the first of them only.

    An address identifies a storage while it is alive. Its number stays the same from call to call.

    Args:
        network: Network whose parameters and buffers do not count as activations.
    """

    def __init__(self, network: nn.Module) -> None:
        self._weights = addresses_of(parameters_and_buffers(network))
        self._numbers: dict[int, int] = {}  # by address, of storages that are alive
        self._next_number = count()
        self._saved: set[int] = set()

    def watch(self, nbytes_by_address: dict[int, int], weights: Iterable[Tensor]) -> saved_tensors_hooks:
        """Return a context that notes what autograd saves.

        Args:
            nbytes_by_address: Receives the address and the bytes of each saved storage.
            weights: Tensors of the network as they are on the device, where copies stand for those that lie elsewhere.
        """
        return saved_storages(nbytes_by_address, self._weights | addresses_of(weights))

    def add(self, nbytes_by_address: Mapping[int, int], outputs: Iterable[Tensor]) -> tuple[int, frozenset[int]]:
        """Count what a call saved.

        Args:
            nbytes_by_address: The result of `watch`.
            outputs: Tensors that the call returned.

        Returns:
            The bytes that this call is the first to save, and the numbers of their storages.
        """
        # 1. Outputs get their numbers first: later calls receive them, and the numbers decide between equal cuts.
        for tensor in outputs:
            self._number(tensor)

        # 2. Count each storage that no earlier call has saved.
        nbytes = 0
        numbers = set()
        for address, size in nbytes_by_address.items():
            number = self._numbers.get(address)
            if number is None:
                number = next(self._next_number)
            if number not in self._saved:
                self._saved.add(number)
                numbers.add(number)
                nbytes += size
        return nbytes, frozenset(numbers)

    def _number(self, tensor: Tensor) -> int:
        address = _address(tensor)
        if address not in self._numbers:
            self._numbers[address] = next(self._next_number)
        return self._numbers[address]

    def passing(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Return the bytes of tensors that pass from one call to later ones, by the numbers of their storages."""
        nbytes = {}
        for tensor in tensors:
            nbytes[self._number(tensor)] = tensor.nbytes
        return nbytes

    def keep_only(self, alive: Iterable[Tensor]) -> None:
        """Forget all other storages: their addresses may be used again.

        Args:
            alive: Tensors that still exist.
        """
        numbers = {}
        for tensor in alive:
            address = _address(tensor)
            if address in self._numbers:
                numbers[address] = self._numbers[address]
        self._numbers = numbers


def peak_bytes(function: Callable[[], Any], existing: Iterable[Tensor]) -> int:
    """Return the most bytes that a function's allocations occupied at the same time.

    Args:
        function: The function.
        existing: Tensors that exist before, and do not count.
    """
    # References keep the storages alive, so that no other storage gets the same id while the function runs.
    existing_storages = [storage for tensor in existing for storage in storages_of(tensor)]
    counted = {id(storage) for storage in existing_storages}
    live = 0
    peak = 0

    def on_free(key: int, nbytes: int) -> None:
        nonlocal live
        counted.discard(key)
        live -= nbytes

    def on_operation(name: str, result: Any, args: Any) -> None:
        nonlocal live, peak
        for tensor in tensors_in(result):
            for storage in storages_of(tensor):
                key = id(storage)
                if key not in counted:
                    counted.add(key)
                    nbytes = storage.nbytes()
                    live += nbytes
                    # At the interpreter's exit there is nothing left to count.
                    weakref.finalize(storage, on_free, key, nbytes).atexit = False
        peak = max(peak, live)

    watch = OperationWatch(on_operation)
    watch.start()
    try:
        function()
    finally:
        watch.stop()
    return peak
