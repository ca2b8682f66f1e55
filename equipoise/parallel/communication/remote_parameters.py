"""Parameters whose values lie in another process: shapes can be read, values cannot.

A module keeps every parameter, and so does an optimiser; their shapes, dtypes, names and missing gradients stay right.
Values would be wrong whatever they were, so reading or writing one is an error that says where it lies.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from equipoise.errors import StepError

__all__ = ["ElsewhereParameter", "bring_back", "send_elsewhere"]

_ATTRIBUTES = {"__get__", "__set__", "__delete__"}
_QUESTIONS = {
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
_VIEWS = {"detach", "view", "view_as", "expand", "as_subclass"}


def _asked(
    cls: type, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Answer a question about a tensor that lies elsewhere; refuse whatever needs its values."""
    name = getattr(func, "__name__", "")
    plain: Any = nn.Parameter.__torch_function__
    asks_type = name == "type" and len(args) == 1 and not kwargs  # with more arguments it converts
    if asks_type or name in _ATTRIBUTES or name in _QUESTIONS or name in _VIEWS:
        answer = plain(func, types, args, kwargs or {})
        return answer.as_subclass(_ElsewhereView) if type(answer) is Tensor else answer
    if name == "equal":  # callbacks of Lightning's look for a parameter in an optimiser by it
        return args[0] is args[1]
    if name == "__repr__":
        return f"<{_form(args[0])}, device {args[0].device}; the values are in another process>"
    if name == "__format__" and not any(args[1:]):  # a format such as ".3f" needs the value
        return str(args[0])
    form = next((_form(value) for value in _flat(args) if isinstance(value, ElsewhereParameter | _ElsewhereView)), "")
    raise StepError(
        f"A parameter of another stage ({form}) was read or written to by `{name}`, in a callback, a hook or a step,"
        " but its values lie in another process. Use it within the network's forward; or read"
        " `trainer.strategy.module_state(module)`, which is the whole state; or take engine='threads', where all"
        " parameters are in this process."
    )


class ElsewhereParameter(nn.Parameter):
    """A parameter in another process."""

    __torch_function__: Any = classmethod(_asked)


class _ElsewhereView(Tensor):
    """What `data` and `detach` give of one."""

    __torch_function__: Any = classmethod(_asked)


def send_elsewhere(parameter: Tensor) -> None:
    """Let nobody read a parameter from now on.

    Args:
        parameter: The parameter. One of a class of its own stays readable.
    """
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ElsewhereParameter


def bring_back(tensor: Tensor, values: Tensor) -> None:
    """Give a parameter its values back.

    Args:
        tensor: The parameter, or a buffer.
        values: Its values.
    """
    changed: Any = tensor
    if type(tensor) is ElsewhereParameter:
        changed.__class__ = nn.Parameter
    tensor.data = values


def _flat(values: Any) -> list[Any]:
    if isinstance(values, list | tuple):
        return [item for value in values for item in _flat(value)]
    return [values]


def _form(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}"
