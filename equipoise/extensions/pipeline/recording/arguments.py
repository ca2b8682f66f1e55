"""Arguments of recorded calls: calls in the place of tensors."""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence

from equipoise.extensions.pipeline.graph.output_structure import OutputStructure
from equipoise.extensions.pipeline.graph.traced import STAGE_DEVICE, STAYS
from equipoise.extensions.pipeline.recording.targets import rebuilt
from equipoise.extensions.pipeline.recording.tensor_nodes import Obstacle, TensorNodes

__all__ = ["Arguments"]

# Values that a graph can hold.
_PLAIN = (bool, int, float, complex, str, type(None), type(Ellipsis), range)
_PLAIN_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format, torch.device)
# Objects that a graph looks up, since their tensors are none of the call.
_CONSTANTS = (nn.Module, enum.Enum, type)


class Arguments:
    """Turns the arguments of a call into those of a call in a graph.

    Args:
        graph: The graph.
        tensors: The calls that compute tensors.
        device: The device of the recording.
    """

    def __init__(self, graph: fx.Graph, tensors: TensorNodes, device: torch.device) -> None:
        self._graph = graph
        self._tensors = tensors
        self._device = device

    def convert_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return positional arguments and keyword arguments of a call as `convert` does."""
        return self.convert(tuple(args)), self.convert(dict(kwargs))

    def convert(self, value: Any) -> Any:
        """Return a nested value with calls in the place of tensors.

        Args:
            value: The nested value.

        Raises:
            Obstacle: If the value has tensors that cannot be followed.
        """
        # 1. Values that differ from call to call, or from stage to stage.
        if isinstance(value, Tensor):
            return self._tensors.node_of(value)
        if isinstance(value, torch.device) and value == self._device:
            return STAGE_DEVICE

        # 2. Values without tensors.
        kind = type(value)
        if kind in _PLAIN or isinstance(value, _PLAIN_OF_TORCH):
            return value
        if isinstance(value, torch.Size):
            return tuple(value)

        # 3. Containers whose items may be tensors.
        if isinstance(value, PackedSequence):
            # Its constructor asks for the device of its tensors.
            return self._add_call(PackedSequence, value)
        if isinstance(value, slice):
            return slice(*map(self.convert, (value.start, value.stop, value.step)))
        if kind in (tuple, list):
            return kind(map(self.convert, value))
        if kind is dict and all(isinstance(key, str) for key in value):
            return {key: self.convert(item) for key, item in value.items()}
        return self._convert_object(value)

    def _convert_object(self, value: Any) -> Any:
        """Return a call that returns an object, or builds one like it."""
        if isinstance(value, torch.Generator):
            raise Obstacle("draws from a generator of its own")

        # 1. Objects without tensors stay as they are.
        if isinstance(value, _CONSTANTS):
            return self._tensors.constant(value)
        structure, tensors = OutputStructure.of(value)
        if not tensors:
            return self._tensors.constant(value)

        # 2. Containers are built again from their tensors.
        is_container = isinstance(value, Mapping | tuple | list)
        if not is_container and not is_dataclass(value):
            raise Obstacle(f"hands on a {type(value).__name__}, whose tensors cannot be followed")
        return self._add_call(rebuilt(structure), tensors)

    def _add_call(self, function: Any, arguments: Iterable[Any]) -> fx.Node:
        node = self._graph.call_function(function, tuple(map(self.convert, arguments)))
        self._tensors.facts[node] = self._tensors.facts_of_arguments(node)
        # A packed sequence of a device has its sizes on the host, so it stays in its stage with them.
        if any(argument.meta.get(STAYS) for argument in node.all_input_nodes):
            node.meta[STAYS] = True
        return node
