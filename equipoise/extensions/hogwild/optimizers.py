"""An optimiser whose state the processes share, as they share the parameters."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from equipoise.errors import StepError
from equipoise.extensions.hogwild.shared_memory import shared_like
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.strategy_optimizer import StrategyOptimizer

__all__ = ["SharedOptimizer"]

# A parameter's entry in the state, by the index of the parameter and the name of the entry, with its shape and dtype.
Entry = tuple[int, str, tuple[int, ...], str]


class SharedOptimizer(StrategyOptimizer):
    """An optimiser of shared parameters with a shared state.

    An optimiser makes its state in its first step. So each process takes one step by itself, unless a checkpoint
    brought a state; then all of them meet and continue with the state of the main process.

    Args:
        optimizer: The user's optimiser, in this process.
        processes: The processes.
    """

    def __init__(self, optimizer: Optimizer, processes: Processes) -> None:
        super().__init__(optimizer)
        self._processes = processes
        self._is_shared = False

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimiser; see `StrategyOptimizer.step`."""
        if self._is_shared:
            return super().step(closure, **kwargs)
        self._share()
        result = super().step(closure, **kwargs)
        if not self._is_shared:
            self._share()
        return result

    def _share(self) -> None:
        """Share the state of the main process, if it has one; all processes call this in the same steps.

        Raises:
            StepError: If this process has a state of other shapes.
        """
        # 1. Processes without a gradient in their first step have no state yet. They receive that of the main process.
        state = self.optimizer.state
        parameters = optimizer_parameters(self.optimizer)
        entries: list[Entry] = [entry for entry, _ in self._entries()]
        expected = self._processes.broadcast(entries)
        if not expected:
            return
        if entries and entries != expected:
            raise StepError(
                f"The state of {type(self.optimizer).__name__} differs between processes, so it cannot be shared. Take"
                " HogwildStrategy(optimizer_state='own')."
            )
        values_by_index: dict[int, dict[str, Any]] = self._processes.broadcast(self._state_by_index())

        # 2. The same memory in all processes.
        tensors = [values_by_index[index][name] for index, name, _, _ in expected]
        shared = shared_like(tensors, self._processes)
        for index, values in values_by_index.items():
            state[parameters[index]] = dict(values)
        for (index, name, _, _), tensor in zip(expected, shared, strict=True):
            state[parameters[index]][name] = tensor
        self._is_shared = True

    def _entries(self) -> Iterator[tuple[Entry, Tensor]]:
        """Yield the tensors of the state, in the order of the parameters."""
        for index, values in self._state_by_index().items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    entry = (index, name, tuple(value.shape), str(value.dtype))
                    yield entry, value

    def _state_by_index(self) -> dict[int, dict[str, Any]]:
        """Return the state of each parameter that has one, by the index of the parameter."""
        state = self.optimizer.state
        by_index = {}
        for index, parameter in enumerate(optimizer_parameters(self.optimizer)):
            if state.get(parameter):
                by_index[index] = dict(state[parameter])
        return by_index
