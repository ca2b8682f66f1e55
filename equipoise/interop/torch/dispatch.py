"""Watch every operation of torch, by its dispatch mode.

Dispatch modes live in `torch.utils._python_dispatch`; torch documents them nowhere else, and nothing public sees what a
backward allocates. Features that watch operations are refused without them.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from equipoise import tree
from equipoise.interop.adapters import find

__all__ = [
    "DispatchMode",
    "OnOperation",
    "OperationWatch",
    "change_class",
    "empty_wrapper",
    "namespace_of",
    "own_functions",
    "tensor_in_memory",
    "tensors_in",
    "unwatched",
]

# Receives the name of an operation, its result, and its positional arguments.
OnOperation = Callable[[str, Any, Any], None]

# The class has no types. A feature that needs it is refused if it is missing.
DispatchMode: Any = find("torch.utils._python_dispatch.TorchDispatchMode") or object
# The classes of operations: those with several overloads, and the base of all others.
_PACKET: Any = type(torch.ops.aten.add)
_OVERLOAD = type(torch.ops.aten.add.Tensor)
_OPERATION: Any = _OVERLOAD if _OVERLOAD.__base__ is object else _OVERLOAD.__base__
# A context that hides operations from modes of functions.
# Within it a tensor of a subclass is computed with as a plain one. Torch's notes on subclasses name it.
own_functions: Callable[[], AbstractContextManager[Any]] = find("torch._C.DisableTorchFunctionSubclass") or nullcontext
_unheard: Callable[[], AbstractContextManager[Any]] = find("torch._C.DisableTorchFunction") or nullcontext


def change_class(tensor: Tensor, kind: type[Tensor], **attributes: Any) -> None:
    """Let a tensor be one of another class, as torch does with lazy parameters.

    Args:
        tensor: The tensor.
        kind: The class, which derives from the tensor's class, or from which that derives.
        attributes: Attributes that it gets.
    """
    tensor.__class__ = kind
    vars(tensor).update(attributes)


class _Passing(threading.local):
    """Says whether operations of a thread pass unwatched."""

    is_on = False


_passing = _Passing()


class _Mode(DispatchMode):  # type: ignore[misc]
    def __init__(self, on_operation: OnOperation, device: torch.device | None) -> None:
        super().__init__()
        self._on_operation = on_operation
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _passing.is_on:
            return func(*args, **kwargs)
        if self._device is not None:
            args = _on(self._device, args)
            kwargs = _on(self._device, kwargs)
        # `func` is called outside the mode, so its own operations are not reported twice.
        result = func(*args, **kwargs)
        self._on_operation(func.overloadpacket.__name__, result, args)
        return result


class OperationWatch:
    """Report every operation of this thread, and of its backward passes, to a function.

    Several watches must stop in the reverse order of their start.

    Args:
        on_operation: Called with the operation's name, such as "addmm", its result, and its positional arguments.
        device: Device on which operations compute; arguments on other devices are copied to it. Default: the device of
            the arguments.

    Example:
        >>> import torch
        >>> names = []
        >>> watch = OperationWatch(lambda name, result, args: names.append(name))
        >>> watch.start()
        >>> _ = torch.ones(2) + 1
        >>> watch.stop()
        >>> names
        ['ones', 'add']
    """

    def __init__(self, on_operation: OnOperation, device: torch.device | None = None) -> None:
        self._on_operation = on_operation
        self._device = device
        self._mode: Any = None

    def start(self) -> None:
        """Start watching. A second call has no effect."""
        if self._mode is None:
            self._mode = _Mode(self._on_operation, self._device)
            self._mode.__enter__()

    def stop(self) -> None:
        """Stop watching. A second call has no effect."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None


@contextmanager
def unwatched() -> Iterator[None]:
    """Let operations of this thread pass within the context: no watch reports them, or moves their arguments.

    Example:
        >>> import torch
        >>> names = []
        >>> watch = OperationWatch(lambda name, result, args: names.append(name))
        >>> watch.start()
        >>> with unwatched():
        ...     _ = torch.ones(2)
        >>> watch.stop()
        >>> names
        []
    """
    before = _passing.is_on
    _passing.is_on = True
    try:
        with _unheard():
            yield
    finally:
        _passing.is_on = before


def namespace_of(function: Any) -> str | None:
    """Return the namespace of an operation that torch dispatches; None for any other function.

    Args:
        function: Any function.

    Example:
        >>> namespace_of(torch.ops.aten.add), namespace_of(torch.add)
        ('aten', None)
    """
    if isinstance(function, _PACKET):
        first, *_ = function.overloads()
        function = getattr(function, first)
    if isinstance(function, _OPERATION):
        return str(getattr(function, "namespace", ""))
    return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in mappings and sequences of any kind."""
    return tree.tensors_in(value, _items_of)


def tensor_in_memory(tensor: Tensor) -> Tensor:
    """Return the tensor that has the memory of a wrapper, such as the shard of a `DTensor`; any other tensor itself.

    A wrapper's own storage has the size of the whole, but no memory.

    Args:
        tensor: Any tensor. A wrapper of several tensors is returned as it is.
    """
    inner: Any = tensor
    while type(inner) not in (Tensor, torch.nn.Parameter) and hasattr(inner, "__tensor_flatten__"):
        names, _ = inner.__tensor_flatten__()
        # A `DTensor` also names its mesh, from torch 2.13 on.
        tensors = [part for part in (getattr(inner, name) for name in names) if isinstance(part, Tensor)]
        if len(tensors) != 1:
            break
        inner = tensors[0]
    return inner  # type: ignore[no-any-return]


def _items_of(value: Any) -> Iterable[Any] | None:
    """Return the items of a mapping or sequence; None for any other value."""
    if isinstance(value, Mapping):
        return value.values()
    # The items of a text are texts again, without end.
    is_text = isinstance(value, (str, bytes))
    if isinstance(value, Sequence) and not is_text:
        return value
    return None


def _on(device: torch.device, value: Any) -> Any:
    """Return the arguments of an operation with tensors of other devices copied to a device."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.device == device:
            return leaf
        return leaf.to(device)

    return tree.map_leaves(copied, value)


def empty_wrapper(kind: type[Tensor], dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a tensor of a class whose tensors wrap others, without its parts: these are its attributes.

    Such classes call this function of torch in their constructors. Nothing public makes one without its constructor.

    Args:
        kind: A class that defines `__torch_dispatch__`.
        dtype: The type of element that the tensor shows.
        size: The shape that it shows.
        stride: Its strides.
    """
    wrapper: Tensor = Tensor._make_wrapper_subclass(kind, size, strides=stride, dtype=dtype)
    return wrapper
