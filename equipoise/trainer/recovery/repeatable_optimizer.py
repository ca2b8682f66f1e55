"""An optimiser's step that is repeated after an out-of-memory error, if it has changed nothing."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from equipoise.interop.torch.modules import versions
from equipoise.memory.out_of_memory import is_out_of_memory
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.trainer.recovery.captured_error import CapturedError, raise_with_advice
from equipoise.trainer.recovery.micro_batching import MicroBatcher

__all__ = ["RepeatableOptimizer"]


class RepeatableOptimizer(StrategyOptimizer):
    """Step an optimiser; once more if memory ran out before anything was changed.

    Args:
        strategy_optimizer: The optimiser as the strategy steps it.
        micro_batcher: Asks the callbacks.
        batch_idx: Function that returns the number of the present batch.
    """

    def __init__(
        self, strategy_optimizer: StrategyOptimizer, micro_batcher: MicroBatcher, batch_idx: Callable[[], int]
    ) -> None:
        super().__init__(strategy_optimizer.optimizer)
        self._inner = strategy_optimizer
        self._micro_batcher = micro_batcher
        self._batch_idx = batch_idx

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimiser."""
        if closure is None:
            return self.step_or_repeat(partial(self._inner.step, **kwargs))
        return self._step_with_closure(closure, **kwargs)

    def unscale(self, scaler: Any) -> None:
        """Unscale the gradients."""
        self._inner.unscale(scaler)

    def scaled_step(self, scaler: Any, **kwargs: Any) -> Any:
        """Step the optimiser unless a gradient is not finite."""
        return self.step_or_repeat(partial(self._inner.scaled_step, scaler, **kwargs))

    def skip(self) -> None:
        """Leave out a step."""
        self._inner.skip()

    def _step_with_closure(self, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Step with a closure. It computes the gradients, and an optimiser may change parameters in between."""
        # An error of the closure has been reported already, where it computed the batch.
        in_closure = False

        def watched_closure() -> Any:
            nonlocal in_closure
            in_closure = True
            loss = closure()
            in_closure = False
            return loss

        try:
            return self._inner.step(watched_closure, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if in_closure or not is_out_of_memory(error):
                raise
            captured = CapturedError.of(error)
        return self._check_repeat(captured, "A step that computes its gradients in a closure is not done again.")

    def step_or_repeat(self, step: Callable[[], Any]) -> Any:
        """Step, and repeat the step if memory ran out, a callback agrees, and nothing has changed."""
        optimizer = self.optimizer
        tensors: Sequence[Tensor] = optimizer_parameters(optimizer)
        num_states = len(optimizer.state)
        values = []
        if num_states:
            values = _state_values(optimizer, num_states)
            tensors = [*tensors, *(value for value in values if isinstance(value, Tensor))]
        versions_before = versions(tensors)
        is_repeated = False
        while True:
            try:
                return step()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                captured = CapturedError.of(error)
            # Without versions everything counts as changed.
            refusal = ""
            # Objects are compared as well: the step may have put others into the state.
            values_now = _state_values(optimizer, num_states)
            same = list(map(id, values_now)) == list(map(id, values))
            if not same or versions_before is None or versions(tensors) != versions_before:
                refusal = "The step had changed something already, so it cannot be done again."
            elif is_repeated:
                refusal = "The step was done once more already."
            self._check_repeat(captured, refusal)
            # State that the failed attempt has begun to create is dropped. New states come last.
            for parameter in list(optimizer.state)[num_states:]:
                del optimizer.state[parameter]
            self._micro_batcher.free_memory()
            is_repeated = True

    def _check_repeat(self, captured: CapturedError, refusal: str) -> None:
        """Report an error to the callbacks, and raise it unless one of them wants the step to be repeated.

        A step cannot be left out: its gradients are those of good batches.

        Args:
            captured: The error.
            refusal: The reason why the step cannot be repeated, whatever callbacks answer; empty if it can.

        Raises:
            OutOfMemoryError: If the step is not repeated.
        """
        event = self._micro_batcher.event(captured, "optimizer step", self._batch_idx(), (), 1, refusal)
        split = self._micro_batcher.ask(event)
        if refusal or split is None or not split.parts:
            raise_with_advice(captured, event)


def _state_values(optimizer: Optimizer, count: int) -> list[Any]:
    """Return the values in the states of the first parameters that have one."""
    return [value for state in islice(optimizer.state.values(), count) for value in state.values()]
