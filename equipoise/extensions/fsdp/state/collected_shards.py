"""The tensors in shards of a checkpoint that is being collected, with placeholders in their place."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from equipoise.parallel.shards.placeholders import make_placeholder

__all__ = ["CollectedShards"]


class CollectedShards:
    """Notes tensors in shards by name, the same names in all processes.

    Attributes:
        tensors: The tensors.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, DTensor] = {}

    def add(self, name: str, value: Any) -> Any:
        """Return a placeholder for a tensor in shards; everything else is returned as it is.

        Args:
            name: The name of the tensor in the checkpoint.
            value: The value.
        """
        if not isinstance(value, DTensor):
            return value
        self.tensors[name] = value
        return make_placeholder(value, name)

    def of_values(self, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values with placeholders for those in shards.

        Args:
            prefix: How their names begin.
            values: The values.
        """
        return {key: self.add(f"{prefix}/{key}", value) for key, value in values.items()}

    def of_module(self, prefix: str, module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a module; a tied parameter is saved once.

        Args:
            prefix: How the names begin.
            module: The module.
            state: Its state.
        """
        # 1. The first name of each parameter. Buffers have one name each.
        first_names: dict[int, str] = {}
        aliases: dict[str, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            aliases[name] = first_names.setdefault(id(parameter), name)
        # 2. The state.
        collected = {}
        for key, value in state.items():
            name = aliases.get(key, key)
            collected[key] = self.add(f"{prefix}/{name}", value)
        return collected
