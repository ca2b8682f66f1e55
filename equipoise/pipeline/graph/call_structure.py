"""The arguments of a network's call, taken apart into tensors and the structure around them."""

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
    """The arguments of a call, their tensors taken out.

    Two calls of the same structure differ in their tensors alone.

    Args:
        args, kwargs: The arguments.

    Raises:
        ConfigurationError: If tensors hide in an object of a kind that nobody can take apart.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self._tree = self._take((tuple(args), kwargs))
        self.key = repr(self._tree)

    def _take(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return _Place(len(self.tensors) - 1)
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, PackedSequence):
            raise ConfigurationError(
                "The network is called with a PackedSequence, which a pipeline cannot pass between its stages. Pass the"
                " padded tensor and the lengths, and pack within a submodule, which stays whole; or choose another"
                " strategy."
            )
        if isinstance(value, tuple | list):
            return rebuild(value, [self._take(item) for item in value])
        if isinstance(value, Mapping):
            return rebuild(value, [self._take(item) for item in value.values()])
        if is_dataclass(value) and not isinstance(value, type):
            return rebuild(value, [self._take(getattr(value, field.name)) for field in fields(value)])
        if any(isinstance(held, Tensor) for held in getattr(value, "__dict__", {}).values()):
            raise ConfigurationError(
                f"The network is called with a {type(value).__name__}, whose tensors a pipeline cannot see. Pass"
                " tensors, or tuples, lists, dictionaries or dataclasses of them."
            )
        return value

    def without_tensors(self) -> "CallStructure":
        """The structure alone, which keeps nothing of the call alive."""
        other = copy.copy(self)
        other.tensors = []
        return other

    def fill(self, tensors: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors in their places."""
        args, kwargs = _filled(self._tree, tensors)
        return args, kwargs


class _Place:
    """Where a tensor goes."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"<{self.index}>"


def _filled(tree: Any, tensors: Any) -> Any:
    if isinstance(tree, _Place):
        return tensors[tree.index]
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, tuple | list):
        return rebuild(tree, [_filled(item, tensors) for item in tree])
    if isinstance(tree, Mapping):
        return rebuild(tree, [_filled(item, tensors) for item in tree.values()])
    if is_dataclass(tree) and not isinstance(tree, type):
        return rebuild(tree, [_filled(getattr(tree, field.name), tensors) for field in fields(tree)])
    return tree
