"""Objects on their way to other processes of this machine, their tensors and arrays in shared memory.

Everything goes into one anonymous file: the pickled object, functions and classes of `__main__` included (cloudpickle),
then the bytes of its CPU tensors and numpy arrays. A process that unpacks it maps the file: nothing is copied, and what
the process then changes is its own (pages are copied when they are written to). Tensors that share memory still do.

The file belongs to nobody else and is gone with the last process that holds it, whatever ends them.
"""

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from multiprocessing import reduction
from pickle import PickleBuffer
from types import FunctionType
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

from equipoise.errors import ConfigurationError

__all__ = ["Layout", "Package", "can_be_packed", "dumps", "find_unpicklable", "loads"]

_ALIGNMENT = 64  # bytes; no dtype wants more


class Layout(NamedTuple):
    """Where things lie in a file: offsets and lengths in bytes; the first is the pickled object."""

    size: int
    parts: tuple[tuple[int, int], ...]


class Package:
    """An anonymous file that travels to a process as an argument of `Process`.

    Example:
        >>> package = Package()
        >>> layout = package.pack({"weights": torch.ones(3)})
        >>> package.unpack(layout)["weights"]
        tensor([1., 1., 1.])
        >>> package.close()
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _anonymous_file() if descriptor is None else descriptor

    def pack(self, value: Any, known: Sequence[Any] = ()) -> Layout:
        """Writes an object.

        Args:
            value: The object.
            known: Objects that the reader has as well, and which it will find in their place.

        Raises:
            ConfigurationError: If a part of it cannot be pickled, naming it.
        """
        buffers: list[PickleBuffer] = []
        main = io.BytesIO()
        try:
            _Pickler(main, buffers, known).dump(value)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError, RecursionError) as error:
            raise ConfigurationError(_explained(value, error)) from error
        parts, offset = [], 0
        for content in (main.getbuffer(), *(buffer.raw() for buffer in buffers)):
            parts.append((offset, content.nbytes))
            _write(self.descriptor, content, offset)
            offset += -(-content.nbytes // _ALIGNMENT) * _ALIGNMENT
        return Layout(offset, tuple(parts))

    def unpack(self, layout: Layout, known: Sequence[Any] = ()) -> Any:
        """Reads what was packed; the object holds the memory from then on.

        Args:
            layout: What `pack` returned.
            known: The reader's own objects, in the writer's order.
        """
        memory = mmap.mmap(self.descriptor, layout.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        view = memoryview(memory)
        main, *buffers = (view[offset : offset + length] for offset, length in layout.parts)
        return _Unpickler(io.BytesIO(main), known, buffers).load()

    def close(self) -> None:
        """Lets go of the file; what was unpacked stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __reduce__(self) -> Any:
        """Works while a process is being started: the file goes with it."""
        return _receive, (reduction.DupFd(self.descriptor),)


def _receive(duplicate: Any) -> Package:
    return Package(duplicate.detach())


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("equipoise")
    with tempfile.TemporaryFile() as file:  # on other systems; it has no name either
        return os.dup(file.fileno())


def _write(descriptor: int, content: memoryview, offset: int) -> None:
    content = content.cast("B")
    while content:
        written = os.pwrite(descriptor, content[: 1 << 30], offset)
        content, offset = content[written:], offset + written
    end = -(-offset // _ALIGNMENT) * _ALIGNMENT
    if end > offset:
        os.pwrite(descriptor, b"\0" * (end - offset), offset)


def dumps(value: Any) -> bytes:
    """An object and its tensors as bytes, for other processes of this run; torch's own cannot read all dtypes back."""
    file = io.BytesIO()
    _Pickler(file, None).dump(value)
    return file.getvalue()


def loads(content: bytes) -> Any:
    """What `dumps` was given."""
    return _Unpickler(io.BytesIO(content), (), None).load()


# Pickling


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves the bytes of tensors on the CPU out, as pickle itself does those of numpy's arrays."""

    def __init__(self, file: Any, buffers: list[PickleBuffer] | None, known: Sequence[Any] = ()) -> None:
        apart = None if buffers is None else buffers.append
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=apart)
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}  # one object for each memory
        self._known = {id(each): index for index, each in enumerate(known)}

    def persistent_id(self, value: Any) -> int | None:
        return self._known.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and _is_plain(value):
            storage = value.untyped_storage()
            storage = self._storages.setdefault((storage.data_ptr(), storage.nbytes()), storage)
            return _tensor, (
                storage,
                value.dtype,
                value.storage_offset(),
                tuple(value.shape),
                value.stride(),
                value.requires_grad,
            )
        if type(value) is torch.UntypedStorage and value.device.type == "cpu":
            content: Any = torch.empty(0, dtype=torch.uint8).set_(value).numpy()
            return _storage, (PickleBuffer(content),)
        return super().reducer_override(value)


class _Unpickler(pickle.Unpickler):
    """Reads what processes of this run wrote for one another, and nothing else."""

    def __init__(self, file: Any, known: Sequence[Any], buffers: Iterable[Any] | None) -> None:
        super().__init__(file, buffers=buffers)
        self._known = known

    def persistent_load(self, index: int) -> Any:
        return self._known[index]


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory and shape are all there is to a tensor."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.is_leaf
        and not vars(tensor)
    )


def _storage(content: Any) -> torch.UntypedStorage:
    view = memoryview(content)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    return tensor.requires_grad_() if requires_grad else tensor


# What cannot be pickled


def find_unpicklable(value: Any) -> tuple[str, Any]:
    """The innermost part of an object that cannot be pickled.

    Args:
        value: An object that cannot.

    Returns:
        The way to that part from the object that holds it, such as `Classifier.stream`, and the part.
    """
    path, seen = "", {id(value)}
    while True:
        if not path and not isinstance(value, _PLUMBING):
            path = type(value).__name__
        found = next(
            ((name, part) for name, part in _parts(value) if id(part) not in seen and not can_be_packed(part)), None
        )
        if found is None:
            return path or type(value).__name__, value
        name, part = found
        seen.add(id(part))
        path = f"{path}{name}" if path and not isinstance(value, _PLUMBING) else ""
        value = part


_PLUMBING = (tuple, list, dict, partial, FunctionType)  # what holds the user's objects on their way


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, partial):
        return [("", part) for part in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return []
    closure = getattr(value, "__closure__", None) or ()
    names = getattr(getattr(value, "__code__", None), "co_freevars", ())
    held = [(f".{name}", cell.cell_contents) for name, cell in zip(names, closure, strict=False)]
    return held + [(f".{name}", part) for name, part in vars(value).items()]


def can_be_packed(value: Any, known: Sequence[Any] = ()) -> bool:
    """Whether an object can be sent to another process; see `Package.pack`."""
    try:
        _Pickler(io.BytesIO(), [], known).dump(value)
    except Exception:
        return False
    return True


def _explained(value: Any, error: Exception) -> str:
    path, part = find_unpicklable(value)
    path, kind = path.removeprefix("Request."), type(part).__name__
    what = f"{path} is a {kind}" if path != kind else f"A {kind}"
    return (
        f"{what}{', which' if path != kind else ''} cannot be sent to other processes: {error}. Create it in `setup` or"
        " on first use, or leave it out in `__getstate__`."
    )
