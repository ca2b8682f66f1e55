"""Operations of torch on tensors of several devices: the tensors are moved to one device, and gradients flow back."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from equipoise.interop.torch.modules import versions
from equipoise.to_device import to_device
from equipoise.tree import map_leaves, tensors_in

__all__ = ["OperationMoves"]

# Operations that change their first argument in place without saying so in their name.
_WRITING = (Tensor.__setitem__, Tensor.__iadd__, Tensor.__isub__, Tensor.__imul__, Tensor.__itruediv__)
# Functions that change statistics, which are the second argument.
_WITH_STATISTICS = (functional.batch_norm, functional.instance_norm)

# A tensor, its version when it was copied, and the copy.
_Copied = tuple[Tensor, list[int] | None, Tensor]

# The class has no types.
_Base: Any = TorchFunctionMode


class OperationMoves(_Base):  # type: ignore[misc]
    """A mode in which operations on tensors of several devices compute on one.

    That is the device of the stage, or that of the tensor which an operation changes. A tensor that several operations
    need elsewhere is moved once, unless it changes in between.

    Args:
        device: Device of the first stage.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        # By the identity of the tensor and the device of the copy.
        self._copies: dict[tuple[int, torch.device], _Copied] = {}

    def go_to(self, device: torch.device) -> None:
        """Compute on another device from now on.

        Args:
            device: The device.
        """
        self._device = device

    def forget(self) -> None:
        """Release the copies of tensors."""
        self._copies.clear()

    def here(self, value: Any) -> Any:
        """Return a nested value with its tensors on the present device.

        Args:
            value: Nested tuples, lists and dictionaries. Tensors in other objects are moved by the operations.
        """
        return self._on(self._device, value)

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Most operations have their tensors on one device, and stay there.
        devices = {tensor.device for tensor in _placed_tensors((args, kwargs))}
        if len(devices) > 1:
            device = self._device_for(func, args, kwargs)
            args = self._on(device, args)
            kwargs = self._on(device, kwargs)
        return func(*args, **kwargs)

    def _device_for(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
        """Return the device of an operation: that of the tensor which it changes, or that of the stage."""
        # An operation that changed a copy would leave the tensor itself as it was.
        changed_value = _changed_by(func, args, kwargs)
        if isinstance(changed_value, Tensor):
            return changed_value.device
        return self._device

    def _on(self, device: torch.device, value: Any) -> Any:
        return map_leaves(lambda leaf: self._copy(leaf, device), value)

    def _copy(self, leaf: Any, device: torch.device) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.device == device or _goes_anywhere(leaf):
            return leaf
        # A mask, for instance, is used by every layer of a stage.
        key = (id(leaf), device)
        version = versions([leaf])
        earlier_copy = self._copies.get(key)
        if earlier_copy is not None:
            original, version_of_copy, copy = earlier_copy
            if original is leaf and version == version_of_copy:
                return copy
        copy = to_device(leaf, device)
        self._copies[key] = (leaf, version, copy)
        return copy


def _changed_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument that an operation changes in place; None if it changes none."""
    # 1. Arguments that are named.
    output = kwargs.get("out")
    if output is not None:
        return output
    if func in _WITH_STATISTICS and "running_mean" in kwargs:
        return kwargs["running_mean"]

    # 2. Arguments by their positions.
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    if func in _WITH_STATISTICS:
        return args[1]
    if args and (is_in_place or func in _WRITING):
        return args[0]
    return None


def _placed_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments that are bound to their device."""
    for tensor in tensors_in(value):
        if not _goes_anywhere(tensor):
            yield tensor


def _goes_anywhere(tensor: Tensor) -> bool:
    """Return True for a number on the CPU, which operations on any device take."""
    return tensor.device.type == "cpu" and tensor.dim() == 0
