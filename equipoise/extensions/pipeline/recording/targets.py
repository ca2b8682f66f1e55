"""Functions of torch as calls of a graph."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.pipeline.graph.output_structure import OutputStructure, structure_of

__all__ = [
    "Modes",
    "applied",
    "assigned",
    "call_of",
    "check_size",
    "check_structure",
    "encoded",
    "holds",
    "name_of",
    "present_modes",
    "rebuilt",
    "under_modes",
]


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, method or attribute of torch, such as "shape"."""
    name = str(getattr(function, "__name__", type(function).__name__))
    if name in ("__get__", "__set__"):
        # The function is a method of an attribute's descriptor, which has the name of the attribute.
        descriptor = getattr(function, "__self__", None)
        return str(getattr(descriptor, "__name__", name))
    return name


def call_of(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Return a function that a graph can hold, and its arguments, for a function, method or attribute of torch."""
    is_attribute = getattr(function, "__name__", "") == "__get__"
    if is_attribute:
        return getattr, (*args, name_of(function))
    if function in (Tensor.__pow__, Tensor.__ipow__):
        # Code of a graph would look in a module of torch for the name that these have, of a method.
        return getattr(Tensor, name_of(function)), args
    return function, args


class Modes(NamedTuple):
    """Modes of torch that a forward may set for some of its calls.

    Attributes:
        grad: True if gradients are recorded.
        autocast: For each kind of device: its name, True if autocast is on, and the dtype of autocast.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]


def present_modes() -> Modes:
    """Return the present modes."""
    autocast = []
    for kind in ("cpu", "cuda"):
        autocast.append((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))
    return Modes(torch.is_grad_enabled(), tuple(autocast))


def under_modes(function: Callable[..., Any], modes: Modes) -> Callable[..., Any]:
    """Return a function that computes in its own modes, whatever the modes around it.

    Args:
        function: The function.
        modes: Its modes.
    """
    return _named(name_of(function).strip("_"), partial(_call_under, function, modes))


def _call_under(function: Callable[..., Any], modes: Modes, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(modes.grad))
        for kind, is_enabled, dtype in modes.autocast:
            is_other_mode = is_enabled != torch.is_autocast_enabled(kind)
            if is_other_mode:
                stack.enter_context(torch.autocast(kind, dtype, is_enabled))
        return function(*args, **kwargs)


def rebuilt(structure: OutputStructure) -> Callable[..., Any]:
    """Return a function that builds an argument of this structure from its tensors."""
    return _named("rebuilt", partial(_filled, structure))


def _filled(structure: OutputStructure, *tensors: Any) -> Any:
    return structure.fill(tensors)


def applied(kind: Any) -> Callable[..., Any]:
    """Return a function that calls an autograd function."""
    return _named(str(kind.__name__), partial(_apply, kind))


def _apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
    return kind.apply(*args, **kwargs)


def _named(name: str, function: Any) -> Callable[..., Any]:
    """Return a function that had no name; the graph names its calls after it."""
    function.__name__ = name
    return function  # type: ignore[no-any-return]


def holds(condition: Any) -> None:
    """Check an assertion of the user's when the forward runs.

    Args:
        condition: The condition, a tensor of one element.

    Raises:
        AssertionError: If the condition is false.
    """
    if not condition:
        raise AssertionError("an assertion in the network's forward does not hold")


def assigned(tensor: Tensor, key: Any, value: Any) -> Tensor:
    """Assign to items of a tensor, and return it. A call whose value is the tensor shows that it has changed.

    Args:
        tensor: The tensor.
        key: Its index.
        value: The new value of the items.
    """
    tensor[key] = value
    return tensor


def encoded(
    encoder: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    """Return the output of a TransformerEncoder without its branches on values, and its shortcut in evaluations.

    Args:
        encoder: The encoder.
        src: See its forward.
        mask: See its forward.
        src_key_padding_mask: See its forward.
        is_causal: Not used, since it is a hint.
    """
    for layer in encoder.layers:
        src = layer(
            src,
            src_mask=mask,
            src_key_padding_mask=src_key_padding_mask,
        )
    if encoder.norm is None:
        return src
    return encoder.norm(src)


def check_size(tensor: Tensor, size: tuple[int, ...]) -> None:
    """Check a size for which the forward has asked while it was recorded.

    Args:
        tensor: A tensor that follows from a submodule that stays whole and reads values.
        size: Its size when it was recorded.

    Raises:
        StepError: If the size is another one.
    """
    if tuple(tensor.shape) != size:
        raise StepError(
            f"A tensor in the network's forward has the sizes {list(tensor.shape)}; in an earlier call with tensors of"
            f" the same sizes it had {list(size)}. A submodule that stays whole returns sizes that depend on values,"
            " and the code around it asks for them. Let a submodule ask that stays whole, too; or choose another"
            " strategy."
        )


def check_structure(value: Any, structure: Any) -> None:
    """Check that a submodule that stays whole returns the same structure as when the forward was recorded.

    Args:
        value: The value that it returns.
        structure: The description of what it returned.

    Raises:
        StepError: If it returns another structure.
    """
    present_structure = structure_of(value)
    if present_structure != structure:
        raise StepError(
            f"A submodule that stays whole returns {present_structure}; in an earlier call with tensors of the same"
            f" sizes it returned {structure}. The code around it was recorded with that. Let that code be in a"
            " submodule that stays whole, too; or choose another strategy."
        )
