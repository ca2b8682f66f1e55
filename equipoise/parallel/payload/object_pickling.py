"""Pickle objects for other processes, with the bytes of their CPU tensors out of band.

Functions and classes of `__main__` travel by value (cloudpickle). Objects that both processes have travel by number.
"""

import io
import marshal
import pickle
import sys
from collections.abc import Iterable, Sequence
from pickle import PickleBuffer
from types import CodeType, FunctionType
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from equipoise.interop.torch.modules import hooks_of
from equipoise.parallel.payload.module_pickling import reduce_module_or_function

__all__ = ["DEFINITIONS", "Pickler", "Unpickler", "can_be_packed", "define"]


class _Definitions:
    """Placeholder for the classes and functions of the user's script that were packed before it, by name."""


DEFINITIONS = _Definitions()


def define(definitions: dict[str, Any]) -> None:
    """Let pickle find classes and functions of the user's script in this process's `__main__`.

    Args:
        definitions: Classes and functions by qualified name, as `DEFINITIONS` is unpacked.
    """
    main = sys.modules["__main__"]
    for name, value in definitions.items():
        if "." in name:
            # Cloudpickle drops the qualified name of a class inside of another.
            value.__qualname__ = name
        else:
            setattr(main, name, value)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles the bytes of CPU tensors out of band, as pickle itself does those of numpy's arrays.

    Args:
        file: Binary file to write to.
        buffers: List that receives the bytes of tensors and arrays; None to write them into the file.
        shared_objects: Objects that the reader has as well. Default: none.
    """

    def __init__(self, file: Any, buffers: list[PickleBuffer] | None, shared_objects: Sequence[Any] = ()) -> None:
        # Without a list for the buffers, pickle writes their bytes into the file.
        buffer_callback = None
        if buffers is not None:
            buffer_callback = buffers.append
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffer_callback)
        # One object for each memory, by address and size, so that tensors which share memory still do.
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}
        # Positions of the reader's objects, by identity.
        self._positions: dict[int, int] = {id(item): index for index, item in enumerate(shared_objects)}
        # Classes and functions of the script, by their names in `__main__`.
        self._script_definitions: dict[str, Any] = {}

    def persistent_id(self, value: Any) -> int | None:
        """Return the position of an object that the reader has as well; None for any other object."""
        return self._positions.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        """Reduce tensors, parameters with hooks, storages and modules; leave all else to cloudpickle."""
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            self._register_definition(value)
        elif value is DEFINITIONS:
            return dict, (dict(self._script_definitions),)
        if type(value) is CodeType:
            # Cloudpickle leaves out the file, which tracebacks and warnings show.
            return marshal.loads, (marshal.dumps(value),)
        if isinstance(value, tuple) and hasattr(value, "_make"):
            # Not by its constructor, which may refuse what stands for tensors.
            return type(value)._make, (tuple(value),), getattr(value, "__dict__", None)
        if type(value) is Tensor and _is_plain(value):
            return self._reduce_tensor(value)
        if type(value) is nn.Parameter:
            hooks = hooks_of(value)
            # Torch's own pickling drops the hooks.
            if hooks:
                return _new_parameter, (value.detach(), value.requires_grad, hooks)
        if type(value) is torch.UntypedStorage and value.device.type == "cpu":
            # A storage offers no buffer; an array of its bytes does.
            content: Any = torch.empty(0, dtype=torch.uint8).set_(value).numpy()
            return _new_storage, (PickleBuffer(content),)
        reduced = reduce_module_or_function(value)
        if reduced is NotImplemented:
            return super().reducer_override(value)
        return reduced

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        storage = self._storages.setdefault((storage.data_ptr(), storage.nbytes()), storage)
        arguments = (
            storage,
            tensor.dtype,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.requires_grad,
        )
        return _new_tensor, arguments

    def _register_definition(self, value: type | FunctionType) -> None:
        """Register a class or function that pickle would find by name in the script, as a loader's worker does."""
        name, *attributes = value.__qualname__.split(".")
        outermost = vars(sys.modules["__main__"]).get(name)
        definition = outermost
        for attribute in attributes:
            definition = getattr(definition, attribute, None)
        if definition is value:
            self._script_definitions[name] = outermost
            self._script_definitions[value.__qualname__] = value


class Unpickler(pickle.Unpickler):
    """Reads messages of processes of this run only, since unpickling runs code."""

    def __init__(self, file: Any, shared_objects: Sequence[Any], buffers: Iterable[Any] | None) -> None:
        super().__init__(file, buffers=buffers)
        self._shared_objects = shared_objects

    def persistent_load(self, index: int) -> Any:
        """Return the reader's object at a position."""
        return self._shared_objects[index]


def _is_plain(tensor: Tensor) -> bool:
    """Return True if memory, shape and strides describe a tensor completely."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.is_leaf
        and not vars(tensor)
    )


def _new_storage(content: Any) -> torch.UntypedStorage:
    view = memoryview(content)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _new_tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    if requires_grad:
        tensor.requires_grad_()
    return tensor


def _new_parameter(data: Tensor, requires_grad: bool, hooks: list[tuple[str, Any]]) -> nn.Parameter:
    parameter = nn.Parameter(data, requires_grad)
    for register, hook in hooks:
        getattr(parameter, register)(hook)
    return parameter


def can_be_packed(value: Any, shared_objects: Sequence[Any] = ()) -> bool:
    """Return True if an object can be sent to another process; see `SharedPayload.pack`."""
    try:
        Pickler(io.BytesIO(), [], shared_objects).dump(value)
    except Exception:
        return False
    return True
