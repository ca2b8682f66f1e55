"""Plain values: numbers, texts, tensors, arrays and containers of them, which a checkpoint can hold."""

import hashlib
import pickle
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.interop.torch.modules import versions

__all__ = ["LARGEST", "Content", "Contents", "memory_of"]

# Bytes of a value that is still written to a checkpoint.
LARGEST = 1 << 26

# Kinds of numpy's data types that hold numbers or texts, and no objects.
_KINDS_OF_NUMPY = "biufcSU"


class Content(NamedTuple):
    """Content of a value, in brief.

    Attributes:
        digest: What tells it from another one.
        size: Its number of bytes. Default: 0.
        has_tensors: Whether there are tensors or arrays in it.
        is_elsewhere: Whether one of them is on another device than the CPU.
    """

    digest: Any
    size: int = 0
    has_tensors: bool = False
    is_elsewhere: bool = False


def memory_of(tensor: Any) -> int | None:
    """Return the address of a tensor's memory, which its views share; None if it has none that could be shared."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage().data_ptr() or None


class Contents:
    """Tells plain values from others, and whether they have changed.

    Attributes:
        own_memory: Memory of tensors that are saved elsewhere. What shares it is no value of its own.
    """

    own_memory: frozenset[int | None] = frozenset()

    def __init__(self) -> None:
        # Not `itertools.count`, which Python 3.14 does not pickle.
        self._next_number = 0
        # Numbers of tensors and modules by identity, which another one may have after this one.
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def of(self, value: Any, largest: int) -> Content | None:
        """Return the content of a value; None if it is not plain.

        Args:
            value: The value.
            largest: Number of bytes from which a value counts as changed only when it is replaced, or has another
                length.
        """
        file = _CheckSum(largest)
        pickler = _PlainPickler(file, self)
        try:
            pickler.dump(value)
        except _LargeError:
            # To read a large value would take long at each checkpoint.
            length = None
            if hasattr(value, "__len__"):
                length = len(value)
            return Content(digest=(id(value), length), size=largest + 1)
        except (_OtherError, pickle.PicklingError, RecursionError):
            return None
        return Content(
            file.digest.digest(),
            size=file.size + pickler.size_of_tensors,
            has_tensors=pickler.has_tensors,
            is_elsewhere=pickler.is_elsewhere,
        )

    def number_of(self, value: Tensor | nn.Module) -> int:
        """Return a number that no other tensor or module has."""
        key = id(value)
        reference, number = self._known.get(key, (None, 0))
        # The reference must not keep the value alive.
        if reference is None or reference() is not value:
            number = self._next_number
            self._next_number += 1
            self._known[key] = (weakref.ref(value), number)
        return number


class _OtherError(Exception):
    """A part of a value is not plain."""


class _LargeError(Exception):
    """A value has too many bytes."""


class _CheckSum:
    """A file that keeps the check sum and the size of what is written to it."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.digest = hashlib.blake2b(digest_size=16)
        self.size = 0

    def write(self, content: Any) -> None:
        self.size += len(content)
        if self.size > self.largest:
            raise _LargeError
        self.digest.update(content)


class _PlainPickler(pickle.Pickler):
    """Pickles plain values: a tensor by its number and version."""

    def __init__(self, file: _CheckSum, contents: Contents) -> None:
        super().__init__(file, protocol=5)
        self._largest = file.largest
        self._contents = contents
        self.size_of_tensors = 0
        self.has_tensors = False
        self.is_elsewhere = False

    def reducer_override(self, value: Any) -> Any:
        """Return the parts of a value that is none of Python's own; it is called for no others."""
        # The reduced form below names this class, which is pickled as usual.
        if value is tuple:
            return NotImplemented
        return tuple, ((type(value).__name__, self._parts_of(value)),)

    def _parts_of(self, value: Any) -> Any:
        # 1. Tensors. Their elements are not read: that would wait for a device.
        if type(value) in (Tensor, nn.Parameter):
            if memory_of(value) in self._contents.own_memory:
                raise _OtherError
            self.size_of_tensors += _size_of(value)
            self.has_tensors = True
            if value.device.type != "cpu":
                self.is_elsewhere = True
            return self._contents.number_of(value), versions([value])
        # 2. Containers, whose items are pickled in turn.
        if isinstance(value, Counter | OrderedDict | defaultdict) or _is_dictionary(value):
            return list(value.items())
        if type(value) is deque:
            return list(value), value.maxlen
        # 3. Values that their texts describe in full.
        if isinstance(value, torch.dtype | torch.device | torch.Size | PurePath):
            return str(value)
        # 4. Arrays. They have no version, so their elements are read.
        if _is_array(value):
            if value.nbytes > self._largest:
                raise _LargeError
            self.has_tensors = True
            return value.dtype.str, value.shape, value.tobytes()
        raise _OtherError


def _size_of(tensor: Tensor) -> int:
    """Return the bytes that a file would hold of a tensor, which are not those of the zeros of a sparse one."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    # Dense tensors do not need it.
    from equipoise.parallel.communication.tensor_copies import dense_members

    # Entries at the same place are added up.
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.detach().coalesce()
    return sum(member.nbytes for member in dense_members(tensor))


def _is_dictionary(value: Any) -> bool:
    """Return True for hyperparameters and the like, whose items are all that they hold."""
    return isinstance(value, dict) and not getattr(value, "__dict__", None)


def _is_array(value: Any) -> bool:
    """Return True for arrays and numbers of numpy that hold no objects."""
    # Without numpy there are no arrays, and it need not be imported for this question.
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in _KINDS_OF_NUMPY
