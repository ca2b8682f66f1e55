"""Steps of optimisers by hand: all processes take them together, with the same gradients."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from equipoise.errors import StepError
from equipoise.interop.torch.optimizers import may_decide_by_loss
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.optimizers.gradient_marks import is_exchanged, scaling_of
from equipoise.strategies.ddp.exchange.by_hand.digests import agree, digest
from equipoise.strategies.ddp.exchange.by_hand.meetings import Event, Kind, Meetings

__all__ = ["OptimizerSteps"]


class OptimizerSteps:
    """Lets the processes meet before a step of an optimiser, by hooks on the optimisers.

    Args:
        optimizers: The optimisers.
        meetings: Where the processes meet.
    """

    def __init__(self, optimizers: Sequence[Optimizer], meetings: Meetings) -> None:
        self._meetings = meetings
        self._handles = []
        for number, optimizer in enumerate(optimizers):
            self._handles.append(optimizer.register_step_pre_hook(partial(self._before_step, number)))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before_step(self, number: int, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Meet the others, after the optimiser's closure if it has one."""
        if self._meetings.are_paused:
            return None
        # Among the positional arguments the optimiser itself comes first.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._meet(number, optimizer, math.nan)
            return None

        def compute() -> Any:
            loss = closure()
            if not may_decide_by_loss(optimizer) or not isinstance(loss, Tensor):
                self._meet(number, optimizer, math.nan)
                return loss
            return _mean_loss(loss, self._meet(number, optimizer, loss.item()))

        return args[:1], {**kwargs, "closure": compute}

    def _meet(self, number: int, optimizer: Optimizer, loss: float) -> list[Event]:
        """Meet the others at a step, and check that all have the same gradients."""
        compared = self._to_compare(optimizer)
        # Usually there is nothing to tell.
        if not compared and not self._meetings.needs_meeting and math.isnan(loss):
            self._meetings.note_step(number)
            return []

        def event() -> dict[str, float]:
            compared[:] = self._to_compare(optimizer)
            # One number for the optimiser, and for the size of its gradients.
            return {"detail": 2 * number + _is_scaled(optimizer), "loss": loss, **digest(compared)}

        events, _ = self._meetings.wait_for_all(Kind.STEP, event)
        self._meetings.note_step(number)
        if not agree(events, compared):
            raise StepError(
                "The processes have different gradients before the step of an optimiser. What"
                " `self.manual_backward(loss)`, `loss.backward()` and `torch.autograd.grad(loss, parameters)` compute"
                " is exchanged. What a process assigns to `.grad` in another way is not, nor what it did with"
                " gradients while it had no backward of its own. Take `self.manual_backward` in all processes, or"
                " average what you assign over them by `self.all_gather`."
            )
        return events

    def _to_compare(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the gradients that may differ between the processes."""
        # After an exchange without a backward of this process, it has not done what others have done meanwhile.
        every = self._meetings.has_joined
        gradients = (parameter.grad for parameter in optimizer_parameters(optimizer))
        return [gradient for gradient in gradients if gradient is not None and (every or not is_exchanged(gradient))]


def _is_scaled(optimizer: Optimizer) -> bool:
    gradients = [parameter.grad for parameter in optimizer_parameters(optimizer)]
    return any(scaling_of(gradient) == "scaled" for gradient in gradients if gradient is not None)


def _mean_loss(loss: Tensor, events: Sequence[Event]) -> Tensor:
    """Return the loss of the samples of all processes, by which an optimiser decides."""
    total = sum(event.weight for event in events)
    mean = sum(event.weight * event.loss for event in events) / total
    return torch.full_like(loss, mean)
