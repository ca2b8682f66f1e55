"""Parameters whose values are in another process: shapes can be read, values cannot.

A module keeps every parameter, and so does an optimiser; their shapes, dtypes, names and missing gradients stay right.
Any value would be wrong, so reading or writing one is an error that says where the values are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.tree import leaves_of

__all__ = ["ElsewhereParameter", "bring_back", "send_elsewhere"]

# Functions that read or write an attribute, such as `grad`.
_ATTRIBUTES = {"__get__", "__set__", "__delete__"}
# Functions that need no values.
_VALUE_FREE = {
    "__len__",
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
# Functions that return a view, which has no values either.
_VIEWS = {"detach", "view", "view_as", "expand", "as_subclass"}
_ALLOWED = _ATTRIBUTES | _VALUE_FREE | _VIEWS


def _torch_function(
    cls: type, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a function of torch on a parameter of another process; raise if it needs the values."""
    name = getattr(func, "__name__", "")
    call: Any = nn.Parameter.__torch_function__
    # With more arguments `type` converts the values.
    reads_type = name == "type" and len(args) == 1 and not kwargs
    if reads_type or name in _ALLOWED:
        result = call(func, types, args, kwargs or {})
        if type(result) is Tensor:
            return result.as_subclass(_ElsewhereView)
        return result
    if name == "equal":
        # Lightning's callbacks look for a parameter in an optimiser by this.
        return args[0] is args[1]
    if name == "__repr__":
        return f"<{_description(args[0])}, device {args[0].device}; the values are in another process>"
    # A format such as ".3f" needs the value.
    if name == "__format__" and not any(args[1:]):
        return str(args[0])
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
    """View of a parameter in another process, as `data` and `detach` return it."""

    __torch_function__: Any = classmethod(_torch_function)


def send_elsewhere(parameter: Tensor) -> None:
    """Mark a parameter as one whose values are in another process, so that reading them raises an error.

    Args:
        parameter: Parameter of this process. One of a class derived from `nn.Parameter` stays readable.
    """
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ElsewhereParameter


def bring_back(tensor: Tensor, values: Tensor) -> None:
    """Set the values of a parameter, and make it an ordinary parameter again.

    Args:
        tensor: Parameter or buffer.
        values: Values of the same shape.
    """
    # mypy knows no assignment to the class of a tensor.
    parameter: Any = tensor
    if type(tensor) is ElsewhereParameter:
        parameter.__class__ = nn.Parameter
    tensor.data = values


def _first_description(args: Sequence[Any]) -> str:
    """Describe the first parameter of another process among nested arguments."""
    for value in leaves_of(args):
        if isinstance(value, ElsewhereParameter | _ElsewhereView):
            return _description(value)
    return ""


def _description(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}"
