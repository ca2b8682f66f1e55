"""Parameters whose values are in another process: shapes can be read, values cannot.

A module keeps every parameter, and so does an optimiser; their shapes, dtypes, names and missing gradients stay right.
Any value would be wrong, so reading or writing one is an error that says where the values are; unless operations are
noted, which are computed there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import currentframe
from types import FrameType
from typing import Any

from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.tree import leaves_of

__all__ = [
    "ElsewhereParameter",
    "Unknown",
    "bring_back",
    "is_elsewhere",
    "is_read_by_user",
    "noted",
    "origin_of",
    "send_buffer_elsewhere",
    "send_elsewhere",
    "view_of",
]

# Called with a function of torch and its arguments; returns the result, or raises Unknown.
Note = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]

# Functions that read or write an attribute, such as `grad`.
_ATTRIBUTES = {"__get__", "__set__", "__delete__"}
# Functions that need no values.
_VALUE_FREE = {
    "__len__",
    "_has_compatible_shallow_copy_type",
    "data_ptr",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_conj",
    "is_floating_point",
    "is_inference",
    "is_neg",
    "is_pinned",
    "is_same_size",
    "is_shared",
    "is_signed",
    "ndimension",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
    "untyped_storage",
}
_VALUE_FREE_ATTRIBUTES = {"device", "dtype", "grad", "is_leaf", "layout", "ndim", "requires_grad", "shape"}
# Functions that return a view, which has no values either.
_VIEWS = {"detach", "view", "view_as", "expand", "as_subclass"}
_ALLOWED = _ATTRIBUTES | _VALUE_FREE | _VIEWS
# Those that have the values of the whole tensor.
_SAME = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
# Functions that read or change the gradient. Optimisers and our own modules do so, which know where gradients are.
_grad: Any = Tensor.grad
_FOR_GRADIENTS = (
    _grad.__get__,
    _grad.__set__,
    _grad.__delete__,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
)
# Packages whose functions use gradients for their caller.
_GO_BETWEENS = {"torch", "lightning", "pytorch_lightning", "collections", "contextlib"}

# What notes operations at present.
_notes: list[Note] = []


class Unknown(Exception):
    """An operation needs values that are in another process."""


def _torch_function(
    cls: type, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a function of torch on a parameter of another process; raise if it needs the values."""
    name = getattr(func, "__name__", "")
    call: Any = nn.Parameter.__torch_function__
    # With more arguments `type` converts the values.
    reads_type = name == "type" and len(args) == 1 and not kwargs
    if reads_type or name in _ALLOWED:
        if func in _FOR_GRADIENTS:
            _check_reader(args[0])
        result = call(func, types, args, kwargs or {})
        if type(result) is Tensor:
            origin = None
            if func in _SAME:
                origin = origin_of(args[0])
            return view_of(result, origin)
        return result
    if name == "equal":
        # Lightning's callbacks look for a parameter in an optimiser by this.
        return args[0] is args[1]
    if name == "__repr__":
        return f"<{_description(args[0])}, device {args[0].device}; the values are in another process>"
    # A format such as ".3f" needs the value.
    if name == "__format__" and not any(args[1:]):
        return str(args[0])
    if _notes:
        try:
            return _notes[-1](func, args, kwargs or {})
        except Unknown:
            pass
    raise StepError(
        f"A parameter of another stage ({_first_description(args)}) was read or written to by `{name}`, in a callback,"
        " a hook or a step, but its values lie in another process. Use it within the network's forward; or read"
        " `trainer.strategy.module_state(module)`, which is the whole state; or take engine='threads', where all"
        " parameters are in this process."
    )


class ElsewhereParameter(nn.Parameter):
    """A parameter in another process."""

    __torch_function__: Any = classmethod(_torch_function)


class _ElsewhereView(Tensor):
    """View of a parameter in another process, as `data` and `detach` return it, or the result of an operation there."""

    __torch_function__: Any = classmethod(_torch_function)


def _torch_function_of_buffer(
    cls: type, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a function of torch on a buffer of another process, whose values are fetched if it needs them."""
    name = getattr(func, "__name__", "")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if name in _VALUE_FREE or (name in _ATTRIBUTES and attribute in _VALUE_FREE_ATTRIBUTES):
        call: Any = nn.Parameter.__torch_function__
        return call(func, types, args, kwargs or {})
    for value in leaves_of([args, kwargs]):
        # The first of them fetches all.
        if isinstance(value, ElsewhereBuffer):
            vars(value)["fetch"]()
    return func(*args, **(kwargs or {}))


class ElsewhereBuffer(Tensor):
    """A buffer in another process. Whatever reads or changes its values fetches those of all buffers."""

    __torch_function__: Any = classmethod(_torch_function_of_buffer)


def is_elsewhere(tensor: Tensor) -> bool:
    """Return whether the values of a tensor are in another process."""
    return isinstance(tensor, ElsewhereParameter | _ElsewhereView)


def view_of(tensor: Tensor, origin: Any) -> Tensor:
    """Return a tensor as one whose values are in another process.

    Args:
        tensor: Has the shape, and no values.
        origin: The parameter whose values it has, or what stands for the result of an operation; None if neither.
    """
    view = tensor.as_subclass(_ElsewhereView)
    vars(view)["origin"] = origin
    return view


def origin_of(tensor: Tensor) -> Any:
    """Return the parameter whose values a tensor has, or what stands for the result of an operation; see `view_of`."""
    if isinstance(tensor, ElsewhereParameter):
        return tensor
    return vars(tensor).get("origin")


@contextmanager
def noted(note: Note) -> Iterator[None]:
    """Note operations in other processes within the context, instead of refusing them."""
    _notes.append(note)
    try:
        yield
    finally:
        _notes.pop()


def send_elsewhere(parameter: nn.Parameter, shape: Tensor) -> None:
    """Mark a parameter as one whose values are in another process, so that reading them raises an error.

    Args:
        parameter: Parameter of this process. One of a class derived from `nn.Parameter` stays readable.
        shape: A placeholder in place of its values.
    """
    parameter.data = shape
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ElsewhereParameter


def send_buffer_elsewhere(buffer: Tensor, fetch: Callable[[], None]) -> None:
    """Mark a buffer as one whose values are in another process.

    Args:
        buffer: Buffer of this process. One of a class derived from `Tensor` keeps the values that it has.
        fetch: Brings the values of all buffers back.
    """
    if type(buffer) is Tensor:
        marked: Any = buffer
        marked.__class__ = ElsewhereBuffer
        marked.fetch = fetch


def bring_back(tensor: Tensor, values: Tensor) -> None:
    """Set the values of a parameter or buffer, and make it an ordinary one again.

    Args:
        tensor: Parameter or buffer.
        values: Values of the same shape.
    """
    # mypy knows no assignment to the class of a tensor.
    parameter: Any = tensor
    if type(tensor) is ElsewhereParameter:
        parameter.__class__ = nn.Parameter
    if type(tensor) is ElsewhereBuffer:
        parameter.__class__ = Tensor
        del parameter.fetch
    tensor.data = values


def is_read_by_user() -> bool:
    """Return whether the user's code, not ours, called the function that calls the one that calls this."""
    frame = currentframe()
    # This function, those two, and functions that read for others.
    depth = 0
    while frame is not None and (depth < 3 or _package_of(frame) in _GO_BETWEENS):
        frame = frame.f_back
        depth += 1
    return frame is None or _package_of(frame) != "equipoise"


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _check_reader(parameter: Tensor) -> None:
    """Raise if the user's code reads or changes a gradient, which is None in this process."""
    if is_read_by_user():
        raise StepError(
            f"The gradient of a parameter of another stage ({_description(parameter)}) was read, changed or given a"
            " hook, but it lies in another process. Take engine='threads', where all gradients are in this process."
            " The trainer zeroes gradients; norms and values over all stages are clipped by"
            " Trainer(gradient_clip_val=...) and `self.clip_gradients`."
        )


def _first_description(args: Sequence[Any]) -> str:
    """Describe the first parameter of another process among nested arguments."""
    for value in leaves_of(args):
        if isinstance(value, ElsewhereParameter | _ElsewhereView):
            return _description(value)
    return ""


def _description(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}"
