"""Activation memory of each call: storages kept for the backward, and peaks in between."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from equipoise.interop.torch.dispatch import OperationWatch, tensors_in

__all__ = ["SavedTensors", "moment"]


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """Return where the values of a tensor lie; empty for a sparse one, whose parts are tensors of their own."""
    return [tensor.untyped_storage()] if tensor.layout is torch.strided else []


class SavedTensors:
    """Knows storages again from call to call, so that what two calls save counts for the first of them.

    Args:
        network: Its parameters are no activations.
    """

    def __init__(self, network: nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
        self._numbers: dict[int, int] = {}  # of storages that live: their place in memory, and their number
        self._next = count()
        self._saved: set[int] = set()

    def watch(self, seen: dict[int, int]) -> saved_tensors_hooks:
        """Notes the places and bytes of what is saved."""

        def pack(tensor: Tensor) -> Tensor:
            for storage in storages_of(tensor):
                if storage.data_ptr() not in self._parameters:
                    seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        return saved_tensors_hooks(pack, lambda packed: packed)

    def add(self, seen: Mapping[int, int], made: Iterable[Tensor]) -> tuple[int, frozenset[int]]:
        """A call has been measured.

        Args:
            seen: What `watch` noted.
            made: What it returned.

        Returns:
            The bytes that it is the first to save, and the numbers of their storages.
        """
        for tensor in made:
            self._number(tensor)
        nbytes, numbers = 0, set()
        for place, size in seen.items():
            number = self._numbers.get(place)
            number = next(self._next) if number is None else number
            if number not in self._saved:
                self._saved.add(number)
                numbers.add(number)
                nbytes += size
        return nbytes, frozenset(numbers)

    def _number(self, tensor: Tensor) -> int:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._numbers:
            self._numbers[place] = next(self._next)
        return self._numbers[place]

    def passing(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """The numbers of storages that pass from one call to later ones, and the bytes that are sent."""
        return {self._number(tensor): tensor.nbytes for tensor in tensors}

    def keep_only(self, alive: Iterable[Tensor]) -> None:
        """Everything else has gone, and its place may be another's."""
        places = {tensor.untyped_storage().data_ptr() for tensor in alive}
        self._numbers = {place: number for place, number in self._numbers.items() if place in places}


def moment(function: Callable[[], Any], existing: Iterable[Tensor]) -> int:
    """The most bytes that were alive at once of those that a function allocated.

    Args:
        function: The function.
        existing: Tensors that are there already.
    """
    there = [storage for tensor in existing for storage in storages_of(tensor)]
    known = {id(storage) for storage in there}
    live = most = 0

    def gone(key: int, nbytes: int) -> None:
        nonlocal live
        known.discard(key)
        live -= nbytes

    def saw(name: str, result: Any, args: Any) -> None:
        nonlocal live, most
        for tensor in tensors_in(result):
            for storage in storages_of(tensor):
                if id(storage) not in known:
                    known.add(id(storage))
                    live += storage.nbytes()
                    weakref.finalize(storage, gone, id(storage), storage.nbytes()).atexit = False
        most = max(most, live)

    watch = OperationWatch(saw)
    watch.start()
    try:
        function()
    finally:
        watch.stop()
    return most
