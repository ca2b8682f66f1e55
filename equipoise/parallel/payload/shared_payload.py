"""Objects sent to other processes of this machine, with their tensors in shared memory.

One anonymous file holds the pickled object, with functions and classes of `__main__` (cloudpickle), then the bytes of
its CPU tensors and numpy arrays. A process that unpacks it maps the file: nothing is copied, and its changes stay
private (a page is copied when it is written to). Tensors that share memory still do.

No other program can open the file. It disappears with the last process that has it open, even if that is killed.
"""

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Sequence
from multiprocessing import reduction
from pickle import PickleBuffer
from typing import Any, NamedTuple

from equipoise.errors import ConfigurationError
from equipoise.parallel.payload.object_pickling import Pickler, Unpickler
from equipoise.parallel.payload.unpicklable_parts import explain

__all__ = ["PayloadLayout", "SharedPayload"]

# Bytes between starts of buffers; no dtype needs more.
_ALIGNMENT = 64


class PayloadLayout(NamedTuple):
    """Layout of a file.

    Attributes:
        size: Size of the file in bytes.
        parts: Offset and length in bytes of the pickled object, then of each buffer.
    """

    size: int
    parts: tuple[tuple[int, int], ...]


class SharedPayload:
    """An anonymous file that travels to a process as an argument of `Process`.

    Args:
        descriptor: Open file descriptor. Default: None, that of a new file.

    Example:
        >>> import torch
        >>> package = SharedPayload()
        >>> layout = package.pack({"weights": torch.ones(3)})
        >>> package.unpack(layout)["weights"]
        tensor([1., 1., 1.])
        >>> package.close()
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = _anonymous_file()
        self.descriptor = descriptor

    def pack(self, value: Any, shared_objects: Sequence[Any] = ()) -> PayloadLayout:
        """Write an object to the file.

        Args:
            value: The object.
            shared_objects: Objects that the reader has as well; the reader's objects replace them.

        Raises:
            ConfigurationError: If a part of it cannot be pickled, naming it.
        """
        buffers: list[PickleBuffer] = []
        main = io.BytesIO()
        try:
            Pickler(main, buffers, shared_objects).dump(value)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError, RecursionError) as error:
            raise ConfigurationError(explain(value, error)) from error
        return self._write_parts([main.getbuffer(), *(buffer.raw() for buffer in buffers)])

    def _write_parts(self, contents: list[memoryview]) -> PayloadLayout:
        parts = []
        offset = 0
        for content in contents:
            parts.append((offset, content.nbytes))
            _write(self.descriptor, content, offset)
            offset += _aligned(content.nbytes)
        return PayloadLayout(offset, tuple(parts))

    def unpack(self, layout: PayloadLayout, shared_objects: Sequence[Any] = ()) -> Any:
        """Return the object of the file. Its tensors use the mapped memory.

        Args:
            layout: Layout that `pack` returned.
            shared_objects: Objects of the reader that replace those of the writer, in the writer's order.
        """
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        memory = mmap.mmap(self.descriptor, layout.size, flags=mmap.MAP_PRIVATE, prot=protection)
        view = memoryview(memory)
        main, *buffers = [view[offset : offset + length] for offset, length in layout.parts]
        return Unpickler(io.BytesIO(main), shared_objects, buffers).load()

    def close(self) -> None:
        """Close the file; unpacked objects stay valid."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __reduce__(self) -> Any:
        """Duplicate the descriptor for a process that is being started; pickling at another time fails."""
        return _receive, (reduction.DupFd(self.descriptor),)


def _receive(duplicate: Any) -> SharedPayload:
    return SharedPayload(duplicate.detach())


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("equipoise")
    # Systems other than Linux have a temporary file without a name.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _aligned(size: int) -> int:
    """Round a size or an offset up to the alignment, in bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _write(descriptor: int, content: memoryview, offset: int) -> None:
    """Write bytes at an offset, and zeros up to the next aligned offset."""
    content = content.cast("B")
    while content:
        # The system writes at most 2 GiB in one call.
        written = os.pwrite(descriptor, content[: 1 << 30], offset)
        content = content[written:]
        offset += written
    end = _aligned(offset)
    if end > offset:
        os.pwrite(descriptor, b"\0" * (end - offset), offset)
