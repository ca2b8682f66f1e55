"""An optimiser's step that is repeated after an out-of-memory error, if it has changed nothing."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from equipoise.interop.torch.modules import versions
from equipoise.memory.out_of_memory import is_out_of_memory
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.trainer.recovery.captured_error import CapturedError, raise_with_advice
from equipoise.trainer.recovery.micro_batching import MicroBatcher

__all__ = ["RepeatableOptimizer"]

# Version counters of the parameters and of the optimiser's state. None: torch counts none, as in inference mode.
_Versions = tuple[list[int] | None, list[int] | None]


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
            return self._step_or_repeat(partial(self._inner.step, **kwargs))
        return self._step_with_closure(closure, **kwargs)

    def unscale(self, scaler: Any) -> None:
        """Unscale the gradients."""
        self._inner.unscale(scaler)

    def scaled_step(self, scaler: Any, **kwargs: Any) -> Any:
        """Step the optimiser unless a gradient is not finite."""
        return self._step_or_repeat(partial(self._inner.scaled_step, scaler, **kwargs))

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
        return self._refuse(captured, "A step that computes its gradients in a closure is not done again.")

    def _step_or_repeat(self, step: Callable[[], Any]) -> Any:
        """Step, and repeat the step if memory ran out, a callback agrees, and nothing has changed."""
        # 1. The first attempt.
        versions_before = _versions(self.optimizer)
        had_state = versions_before[1] != []
        try:
            return step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            captured = CapturedError.of(error)

        # 2. The decision. A step cannot be left out: its gradients are those of good batches.
        if _has_changed(versions_before, _versions(self.optimizer)):
            self._refuse(captured, "The step had changed something already, so it cannot be done again.")
        event = self._micro_batcher.event(captured, "optimizer step", self._batch_idx(), (), 1)
        split = self._micro_batcher.ask(event)
        if split is None or not split.parts:
            raise_with_advice(captured, event)

        # 3. The second attempt. State that the first one has begun to create is dropped.
        if not had_state:
            self.optimizer.state.clear()
        self._micro_batcher.free_memory()
        try:
            return step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            captured = CapturedError.of(error)
        return self._refuse(captured, "The step was done once more already.")

    def _refuse(self, captured: CapturedError, refusal: str) -> NoReturn:
        """Report the error to the callbacks and raise it: the step cannot be repeated."""
        event = self._micro_batcher.event(captured, "optimizer step", self._batch_idx(), (), 1, refusal)
        self._micro_batcher.ask(event)
        raise_with_advice(captured, event)


def _versions(optimizer: Optimizer) -> _Versions:
    """Return how often the parameters and the optimiser's state were changed; [] if there is no state."""
    parameters = versions(optimizer_parameters(optimizer))
    if not optimizer.state:
        return parameters, []
    tensors: list[Tensor] = []
    for state in optimizer.state.values():
        tensors.extend(value for value in state.values() if isinstance(value, Tensor))
    return parameters, versions(tensors)


def _has_changed(before: _Versions, after: _Versions) -> bool:
    """Return True if parameters or state changed, or if there are no versions. State created by the step is ignored."""
    parameters_before, state_before = before
    parameters_after, state_after = after
    if parameters_before is None or parameters_before != parameters_after:
        return True
    if state_before is None:
        return True
    return bool(state_before) and state_before != state_after
