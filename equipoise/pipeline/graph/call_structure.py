"""The arguments of a network's call, split into tensors and the structure around them."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from equipoise.errors import ConfigurationError
from equipoise.parallel.batches.splitting import rebuild

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
        self.tensors: list[Tensor] = []
        arguments = (tuple(args), kwargs)
        self._tree = self._replace_tensors(arguments)
        self.key = repr(self._tree)

    def _replace_tensors(self, value: Any) -> Any:
        """Return a nested value with slots in place of its tensors, and note the tensors."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return _Slot(len(self.tensors) - 1)
        if isinstance(value, torch.Size):
            # A tuple that cannot be rebuilt from other items than numbers.
            return value
        if isinstance(value, PackedSequence):
            raise ConfigurationError(
                "The network is called with a PackedSequence, which a pipeline cannot pass between its stages. Pass the"
                " padded tensor and the lengths, and pack within a submodule, which stays whole; or choose another"
                " strategy."
            )
        if isinstance(value, tuple | list):
            items = [self._replace_tensors(item) for item in value]
            return rebuild(value, items)
        if isinstance(value, Mapping):
            items = [self._replace_tensors(item) for item in value.values()]
            return rebuild(value, items)
        if is_dataclass(value) and not isinstance(value, type):
            items = [self._replace_tensors(getattr(value, field.name)) for field in fields(value)]
            return rebuild(value, items)
        attributes = getattr(value, "__dict__", {})
        if any(isinstance(attribute, Tensor) for attribute in attributes.values()):
            raise ConfigurationError(
                f"The network is called with a {type(value).__name__}, whose tensors a pipeline cannot see. Pass"
                " tensors, or tuples, lists, dictionaries or dataclasses of them."
            )
        return value

    def without_tensors(self) -> "CallStructure":
        """Return the structure alone, which keeps no tensor of the call alive."""
        structure = copy.copy(self)
        structure.tensors = []
        return structure

    def fill(self, tensors: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors.

        Args:
            tensors: As many tensors as the call has; also values that stand for them in a trace.
        """
        args, kwargs = _filled(self._tree, tensors)
        return args, kwargs


class _Slot:
    """Place of a tensor in the arguments.

    Args:
        index: Index of the tensor.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    # The key of a structure contains this text.
    def __repr__(self) -> str:
        return f"<{self.index}>"


def _filled(tree: Any, tensors: Any) -> Any:
    """Return a nested value with tensors in place of its slots."""
    if isinstance(tree, _Slot):
        return tensors[tree.index]
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, tuple | list):
        items = [_filled(item, tensors) for item in tree]
        return rebuild(tree, items)
    if isinstance(tree, Mapping):
        items = [_filled(item, tensors) for item in tree.values()]
        return rebuild(tree, items)
    if is_dataclass(tree) and not isinstance(tree, type):
        items = [_filled(getattr(tree, field.name), tensors) for field in fields(tree)]
        return rebuild(tree, items)
    return tree
