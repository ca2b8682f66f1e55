"""Plain values: numbers, texts, tensors, arrays and containers of them, which a checkpoint can hold."""

import hashlib
import pickle
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from itertools import count
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.interop.torch.modules import versions

__all__ = ["LARGEST", "Content", "Contents", "copied", "put"]

# Bytes of a value that is still written to a checkpoint.
LARGEST = 1 << 26

_CPU = torch.device("cpu")
_FACTORIES = (None, bool, dict, float, int, list, set, str, tuple)


class Content(NamedTuple):
    """What tells a value from another one, its size in bytes, and whether it has tensors, and any on no CPU."""

    digest: Any
    size: int
    has_tensors: bool = False
    is_elsewhere: bool = False


class Contents:
    """Tells plain values from others, and whether they have changed."""

    def __init__(self) -> None:
        self._numbers = count()
        # Numbers of tensors by identity, which another tensor may have after this one.
        self._tensors: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def of(self, value: Any, largest: int) -> Content | None:
        """Return the content of a value; None if it is not plain.

        Args:
            value: The value.
            largest: Number of bytes from which a value counts as changed only when it is replaced, or has another
                length.
        """
        written = _Written(largest)
        pickler = _Plain(written, self)
        try:
            pickler.dump(value)
        except _LargeError:
            return Content((id(value), len(value) if hasattr(value, "__len__") else None), largest + 1)
        except (_OtherError, pickle.PicklingError, RecursionError):
            return None
        size = written.size + pickler.size
        return Content(written.digest.digest(), size, pickler.has_tensors, pickler.is_elsewhere)

    def number_of(self, tensor: Tensor) -> int:
        """Return a number that no other tensor has."""
        reference, number = self._tensors.get(id(tensor), (None, 0))
        if reference is None or reference() is not tensor:
            number = next(self._numbers)
            self._tensors[id(tensor)] = (weakref.ref(tensor), number)
        return number


class _OtherError(Exception):
    """A part of a value is not plain."""


class _LargeError(Exception):
    """A value has too many bytes."""


class _Written:
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


class _Plain(pickle.Pickler):
    """Pickles plain values: a tensor by its number and version."""

    def __init__(self, file: _Written, contents: Contents) -> None:
        super().__init__(file, protocol=5)
        self._largest = file.largest
        self._contents = contents
        self.size = 0
        self.has_tensors = False
        self.is_elsewhere = False

    def reducer_override(self, value: Any) -> Any:
        """Return the parts of a value that is none of Python's own; it is called for no others."""
        if value is tuple:
            return NotImplemented
        return tuple, ((type(value).__name__, self._parts_of(value)),)

    def _parts_of(self, value: Any) -> Any:
        if type(value) in (Tensor, nn.Parameter):
            self.size += value.nbytes
            self.has_tensors = True
            self.is_elsewhere |= value.device.type != "cpu"
            return self._contents.number_of(value), versions([value])
        if isinstance(value, Counter | OrderedDict | defaultdict) or _is_dictionary(value):
            return list(value.items())
        if type(value) is deque:
            return list(value), value.maxlen
        if isinstance(value, torch.dtype | torch.device | torch.Size | PurePath):
            return str(value)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufcSU":
            if value.nbytes > self._largest:
                raise _LargeError
            return value.dtype.str, value.shape, value.tobytes()
        raise _OtherError


def _is_dictionary(value: Any) -> bool:
    """Return True for hyperparameters and the like, whose items are all that they hold."""
    return isinstance(value, dict) and not getattr(value, "__dict__", None)


def copied(value: Any, device: torch.device = _CPU) -> Any:
    """Return a copy of a plain value, of types that a file may hold.

    Args:
        value: The value.
        device: The device of its tensors. Default: the CPU.
    """
    copied_item = partial(copied, device=device)
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if type(value) in (list, tuple):
        return type(value)(map(copied_item, value))
    if type(value) is deque:
        return deque(map(copied_item, value), value.maxlen)
    if isinstance(value, dict):
        items = {key: copied_item(item) for key, item in value.items()}
        if type(value) is defaultdict and value.default_factory in _FACTORIES:
            return defaultdict(value.default_factory, items)
        return type(value)(items) if type(value) in (OrderedDict, Counter) else items
    if isinstance(value, set | bytearray) or type(value).__module__ == "numpy":
        return value.copy()
    return value


def put(owner: Any, step: Any, value: Any) -> None:
    """Put a value into an attribute or item; what holds it in place keeps its identity where that is possible.

    Args:
        owner: The object or container.
        step: The name of the attribute, or a list with the key of the item.
        value: The value.
    """
    namespace = owner if isinstance(step, list) else vars(owner)
    key = step[0] if isinstance(step, list) else step
    try:
        present = namespace[key]
    except LookupError:
        present = None
    if not _refill(present, value) and not isinstance(namespace, tuple):
        namespace[key] = value


def _refill(present: Any, value: Any) -> bool:
    """Change the contents of a tensor or container, and return whether that was possible."""
    if isinstance(present, Tensor) and isinstance(value, Tensor):
        if present.shape != value.shape or present.dtype != value.dtype or present.is_inference():
            return False
        present.detach().copy_(value)
        return True
    if isinstance(present, dict | set) and isinstance(value, dict | set):
        present.clear()
        present.update(value)
        return True
    if isinstance(present, list | deque) and isinstance(value, list | deque):
        present.clear()
        present.extend(value)
        return True
    return False
