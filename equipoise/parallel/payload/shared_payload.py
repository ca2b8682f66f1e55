"""Objects sent to other processes of this machine, with their tensors in shared memory.

Everything goes into one anonymous file: the pickled object, functions and classes of `__main__` included (cloudpickle),
then the bytes of its CPU tensors and numpy arrays. A process that unpacks it maps the file: nothing is copied, and what
the process then changes is its own (pages are copied when they are written to). Tensors that share memory still do.

The file belongs to nobody else and is gone with the last process that holds it, whatever ends them.
"""

import io
import mmap
import os
import pickle
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from multiprocessing import reduction
from pickle import PickleBuffer
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.interop.torch.modules import hooks_of
from equipoise.parallel.payload.authentication import opened, sealed
from equipoise.parallel.payload.module_pickling import reduce_module_or_function

__all__ = [
    "DEFINITIONS",
    "PayloadLayout",
    "SharedPayload",
    "can_be_packed",
    "define",
    "dumps",
    "find_unpicklable",
    "loads",
    "pickle_error",
]


class _Definitions:
    """Stands for the classes and functions of the user's script that were packed before it, by name."""


DEFINITIONS = _Definitions()


def define(definitions: dict[str, Any]) -> None:
    """Let pickle find classes and functions of the user's script in this process's `__main__`.

    Args:
        definitions: What `DEFINITIONS` became on its way, by qualified name.
    """
    main = sys.modules["__main__"]
    for name, value in definitions.items():
        if "." in name:
            value.__qualname__ = name  # which a class inside of another loses on its way
        else:
            setattr(main, name, value)


_ALIGNMENT = 64  # bytes; no dtype wants more


class PayloadLayout(NamedTuple):
    """Where things lie in a file: offsets and lengths in bytes; the first is the pickled object."""

    size: int
    parts: tuple[tuple[int, int], ...]


class SharedPayload:
    """An anonymous file that travels to a process as an argument of `Process`.

    Example:
        >>> package = SharedPayload()
        >>> layout = package.pack({"weights": torch.ones(3)})
        >>> package.unpack(layout)["weights"]
        tensor([1., 1., 1.])
        >>> package.close()
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _anonymous_file() if descriptor is None else descriptor

    def pack(self, value: Any, known: Sequence[Any] = ()) -> PayloadLayout:
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
        return PayloadLayout(offset, tuple(parts))

    def unpack(self, layout: PayloadLayout, known: Sequence[Any] = ()) -> Any:
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


def _receive(duplicate: Any) -> SharedPayload:
    return SharedPayload(duplicate.detach())


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


def dumps(value: Any, known: Sequence[Any] = ()) -> bytes:
    """An object and its tensors as bytes, for other processes of this run; torch's own cannot read all dtypes back.

    Args:
        value: The object.
        known: Objects that the reader has as well, and which it will find in their place.
    """
    file = io.BytesIO()
    _Pickler(file, None, known).dump(value)
    return sealed(file.getvalue())


def pickle_error(error: BaseException) -> bytes | None:
    """An error without its traceback and causes, which are told as text; None if it cannot be sent and read."""
    plain = error.with_traceback(None)
    plain.__cause__ = plain.__context__ = None
    try:
        pickled: bytes = cloudpickle.dumps(plain)
        cloudpickle.loads(pickled)
    except Exception:
        return None
    return pickled


def loads(content: bytes, known: Sequence[Any] = ()) -> Any:
    """What `dumps` was given.

    Args:
        content: The bytes.
        known: The reader's own objects, in the writer's order.

    Raises:
        WorkerError: If a process has written them that is not of this run.
    """
    return _Unpickler(io.BytesIO(opened(content)), known, None).load()


# Pickling


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves the bytes of tensors on the CPU out, as pickle itself does those of numpy's arrays."""

    def __init__(self, file: Any, buffers: list[PickleBuffer] | None, known: Sequence[Any] = ()) -> None:
        apart = None if buffers is None else buffers.append
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=apart)
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}  # one object for each memory
        self._known = {id(each): index for index, each in enumerate(known)}
        self._of_script: dict[str, Any] = {}  # by their names in `__main__`

    def persistent_id(self, value: Any) -> int | None:
        return self._known.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            self._note(value)
        elif value is DEFINITIONS:
            return dict, (dict(self._of_script),)
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
        if type(value) is nn.Parameter and (hooks := hooks_of(value)):  # which torch's own pickling drops
            return _parameter, (value.detach(), value.requires_grad, hooks)
        if type(value) is torch.UntypedStorage and value.device.type == "cpu":
            content: Any = torch.empty(0, dtype=torch.uint8).set_(value).numpy()
            return _storage, (PickleBuffer(content),)
        reduced = reduce_module_or_function(value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced

    def _note(self, value: type | FunctionType) -> None:
        """Note what pickle would find by name in the script, as the worker of a loader does."""
        name, *rest = value.__qualname__.split(".")
        found = outermost = vars(sys.modules["__main__"]).get(name)
        for each in rest:
            found = getattr(found, each, None)
        if found is value:
            self._of_script[name] = outermost
            self._of_script[value.__qualname__] = value


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


def _parameter(data: Tensor, requires_grad: bool, hooks: list[tuple[str, Any]]) -> nn.Parameter:
    parameter = nn.Parameter(data, requires_grad)
    for register, hook in hooks:
        getattr(parameter, register)(hook)
    return parameter


# What cannot be pickled


def find_unpicklable(value: Any) -> tuple[str, Any]:
    """The innermost part of an object that cannot be pickled.

    Args:
        value: An object that cannot.

    Returns:
        The way to that part from the object that holds it, such as `Classifier.stream`, and the part.
    """
    chain, names = [value], [""]
    while True:
        # Whoever refers back to what holds it would seem to be in the way itself.
        found = next(((n, part) for n, part in _parts(value) if _is_in_the_way(part, chain)), None)
        if found is None:
            return _told(chain, names), value
        names.append(found[0])
        chain.append(value := found[1])


def _is_in_the_way(part: Any, chain: list[Any]) -> bool:
    return all(part is not each for each in chain) and not can_be_packed(part, chain)


_PLUMBING = (tuple, list, dict, partial, FunctionType)  # what holds the user's objects on their way


def _told(chain: list[Any], names: list[str]) -> str:
    """The way to the last of a chain, from the first object of the user's on."""
    first = next((index for index, each in enumerate(chain) if not _is_ours(each)), len(chain) - 1)
    if isinstance(chain[first], type):
        return f"{chain[first].__name__}{''.join(names[first + 1 :])}"
    way = "".join(names[first + 1 :])
    for registered in ("._modules", "._parameters", "._buffers"):
        while (at := way.find(f"{registered}['")) >= 0:
            end = way.index("']", at)
            way = f"{way[:at]}.{way[at + len(registered) + 2 : end]}{way[end + 2 :]}"
    return f"{type(chain[first]).__name__}{way}"


def _is_ours(value: Any) -> bool:
    return isinstance(value, _PLUMBING) or type(value).__module__.split(".")[0] == "equipoise"


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [("{...}", part) for part in value]
    if isinstance(value, partial):
        return [("", part) for part in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if isinstance(value, MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if isinstance(value, type):  # others are looked up by name
        members = vars(value).items() if value.__module__ == "__main__" else ()
        return [(f".{name}", part) for name, part in members if name not in ("__dict__", "__weakref__")]
    slots = [slot for kind in type(value).__mro__ for slot in _slots(kind) if hasattr(value, slot)]
    held = [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]
    return [*held, *((f".{slot}", getattr(value, slot)) for slot in slots), ("", type(value))]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _parts_of_function(function: FunctionType) -> list[tuple[str, Any]]:
    """What a function that is sent as a whole takes along: its closure and the globals that it names."""
    closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    held = [(f".{name}", cell.cell_contents) for name, cell in closure]
    named = [
        (f".{name}", function.__globals__[name]) for name in function.__code__.co_names if name in function.__globals__
    ]
    return [*held, *named, *((f".{name}", part) for name, part in vars(function).items())]


def can_be_packed(value: Any, known: Sequence[Any] = ()) -> bool:
    """Whether an object can be sent to another process; see `SharedPayload.pack`."""
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
        " on first use, in `configure_model` if it is a layer, or leave it out in `__getstate__`."
    )
