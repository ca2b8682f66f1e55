"""Entries of a ledger: what is known of a storage, and its purpose once that shows."""

from copy import copy

from torch import Tensor

from equipoise.interop.torch.dispatch import tensor_in_memory
from equipoise.memory.records import Category, TensorRecord

__all__ = ["Entry"]


class Entry:
    """Entry of a storage. Its category is None as long as its purpose is unknown.

    Args:
        tensor: The tensor by which the ledger has met the storage.
        nbytes: Bytes of the storage.
        device: Name of the device.
        module: Name of the module that computed it, until its purpose is known.
        name: Name of the operation that created it, until its purpose is known.
        phase: The phase in which it was allocated.
    """

    __slots__ = ("category", "device", "dtype", "module", "name", "nbytes", "phase", "shape")

    def __init__(self, tensor: Tensor, nbytes: int, device: str, module: str, name: str, phase: str) -> None:
        self.device = device
        self.nbytes = nbytes
        self.shape = tuple(tensor.shape)
        # The tensor is a view of a part of its storage.
        if tensor.nbytes != nbytes:
            self.shape = (nbytes // max(1, tensor.element_size()),)
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.module = module
        self.name = name
        self.phase = phase
        self.category: Category | None = None

    def set_default_category(self, category: Category) -> None:
        """Set the category if it is unknown."""
        if self.category is None:
            self.category = category

    def identify(self, tensor: Tensor, category: Category, module: str, name: str) -> None:
        """Set the purpose of the storage, unless a more certain one is known."""
        if self.category not in (None, "activation", "temporary"):
            return
        self.category = category
        self.module = module
        self.name = name
        tensor = tensor_in_memory(tensor)
        if tensor.untyped_storage().nbytes() == tensor.nbytes:
            self.shape = tuple(tensor.shape)

    def successor(self, tensor: Tensor, nbytes: int, phase: str) -> "Entry":
        """Return an entry of the same purpose for a storage after a change of its size."""
        entry = Entry(tensor, nbytes, self.device, self.module, self.name, phase)
        entry.category = self.category
        return entry

    def moved(self, device: str, nbytes: int) -> "Entry":
        """Return an entry of the same purpose for the storage on another device, or with another size."""
        other = copy(self)
        other.device = device
        other.nbytes = nbytes
        return other

    def record(self) -> TensorRecord:
        """Return the entry as a record."""
        return TensorRecord(
            module=self.module,
            category=self.category or "temporary",
            name=self.name,
            shape=self.shape,
            dtype=self.dtype,
            nbytes=self.nbytes,
        )
