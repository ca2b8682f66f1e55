"""The state of several optimisers that are stepped as one."""

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from equipoise.parallel.optimizer_parameters import optimizer_parameters

__all__ = ["CombinedState"]


class CombinedState(MutableMapping[Tensor, Any]):
    """The state of each parameter of several optimisers, read and changed where its optimiser keeps it.

    Args:
        optimizers: The optimisers, of different parameters.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, parameter: Tensor) -> Any:
        # The state of an optimiser is a `defaultdict`: to read what is missing would add it.
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                return optimizer.state[parameter]
        raise KeyError(parameter)

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        # By identity: tensors are compared by their values.
        for optimizer in self._optimizers:
            if any(parameter is candidate for candidate in optimizer_parameters(optimizer)):
                optimizer.state[parameter] = value
                return
        raise KeyError(parameter)

    def __delitem__(self, parameter: Tensor) -> None:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                del optimizer.state[parameter]
                return
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            yield from optimizer.state

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)
