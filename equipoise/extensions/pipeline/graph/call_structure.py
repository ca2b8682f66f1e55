"""The arguments of a network's call, split into tensors and the structure around them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from equipoise.errors import ConfigurationError
from equipoise.tree import extract_tensors, insert_tensors, items_of, leaves_of

__all__ = ["CallStructure"]


class CallStructure:
    """The structure of a call's arguments, and their tensors.

    Two calls of the same structure differ only in their tensors.

    Args:
        args, kwargs: The arguments.

    Attributes:
        tensors: The tensors, in the order of the arguments.
        key: Text that is equal for calls of the same structure.

    Raises:
        ConfigurationError: If an argument of an unsupported type contains tensors.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        arguments = (tuple(args), kwargs)
        for leaf in leaves_of(arguments, _items_of):
            _check_leaf(leaf)
        self._tree, self.tensors = extract_tensors(arguments, _items_of)
        self.key = repr(self._tree)

    def copies_on(self, device: torch.device) -> list[Tensor]:
        """Return copies of the tensors, which a forward may change. A tensor that is passed twice has one copy.

        Args:
            device: Device of the copies.
        """
        copies: dict[int, Tensor] = {}
        for tensor in self.tensors:
            if id(tensor) in copies:
                continue
            copy_of_tensor = tensor.detach().clone().to(device)
            copy_of_tensor.requires_grad_(tensor.requires_grad)
            copies[id(tensor)] = copy_of_tensor
        return [copies[id(tensor)] for tensor in self.tensors]

    def fill(self, tensors: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors.

        Args:
            tensors: As many tensors as the call has; also values that stand for them in a trace.
        """
        args, kwargs = insert_tensors(self._tree, tensors, _items_of)
        return args, kwargs


def _items_of(value: Any) -> Iterable[Any] | None:
    """Return the items of a container among the arguments; None: the value is passed on as one."""
    # A Size cannot be rebuilt from other items than numbers.
    if isinstance(value, torch.Size | PackedSequence):
        return None
    return items_of(value)


def _check_leaf(value: Any) -> None:
    """Check that a value which is no container has no tensors that a pipeline cannot see."""
    if isinstance(value, Tensor):
        return
    if isinstance(value, PackedSequence):
        raise ConfigurationError(
            "The network is called with a PackedSequence, which a pipeline cannot pass between its stages. Pass the"
            " padded tensor and the lengths, and pack within a submodule, which stays whole; or choose another"
            " strategy."
        )
    attributes = getattr(value, "__dict__", {})
    if any(isinstance(attribute, Tensor) for attribute in attributes.values()):
        raise ConfigurationError(
            f"The network is called with a {type(value).__name__}, whose tensors a pipeline cannot see. Pass"
            " tensors, or tuples, lists, dictionaries or dataclasses of them."
        )
