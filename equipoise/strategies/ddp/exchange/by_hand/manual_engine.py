"""Exchange of gradients in steps by hand, by whatever function of torch the user computes them.

loss.backward(), self.manual_backward(loss),   the mean of `.grad` over all processes, once the backward is done
torch.autograd.backward(loss)
torch.autograd.grad(loss, parameters)          the mean of what is returned, with a graph if it has one
optimizer.step(), the end of `training_step`   nothing is exchanged; the processes wait for each other

What an earlier backward has left in `.grad` is equal in all processes already, so that its mean is itself.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from equipoise.interop.adapters import BY_HAND, check_feature
from equipoise.interop.distributed.backward_calls import BackwardCall, intercept_backwards
from equipoise.interop.torch.autograd import is_in_backward
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.communication.gradient_reducer import GradientReducer
from equipoise.parallel.optimizers.gradient_marks import mark_exchanged, mark_scaled, scaling_of
from equipoise.parallel.step_protocols import StepResult, TrainingStep
from equipoise.strategies.ddp.exchange.by_hand.means import Share
from equipoise.strategies.ddp.exchange.by_hand.meetings import Kind, Meetings
from equipoise.strategies.ddp.exchange.by_hand.optimizer_steps import OptimizerSteps
from equipoise.strategies.ddp.exchange.by_hand.returned_gradients import ReturnedGradients
from equipoise.strategies.distributed.loaders import refuse_missing_batch_by_hand

__all__ = ["ManualEngine"]


class ManualEngine:
    """Exchanges the gradients of steps by hand.

    Args:
        module: The user's module, on its device.
        device: Unused; all engines are made alike.
        options: `bucket_cap_mb`, the size of a bucket in MiB; other entries are ignored.
    """

    def __init__(self, module: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
        check_feature(BY_HAND)
        self._module = module
        self._bucket_megabytes = options["bucket_cap_mb"]
        self._watch_parameters()

        # 1. The backward that runs has reached a parameter.
        self._has_gradients = False
        # What it has announced to the other processes.
        self._announced: Any = None
        # Gradients are sent while it runs.
        self._overlaps = False
        # False for good once a backward ran within another one, or with a graph of its gradients.
        self._may_overlap = True

        # 2. Every backward, and every step of an optimiser.
        self._meetings = Meetings(self._average_gradients)
        self._returned = ReturnedGradients(self._meetings)
        self._steps = OptimizerSteps(_optimizers_of(module), self._meetings)
        self._release = intercept_backwards(self._run_backward)

    def _watch_parameters(self) -> None:
        """Exchange the gradients of the parameters that require one from now on; begins anew after an unfreezing."""
        parameters = list(self._module.parameters())
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        self._number_by_id = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._reducer = GradientReducer(self._parameters, self._bucket_megabytes, on_gradient=self._begin_exchange)

    def forward_backward(self, step: TrainingStep, parts: Any, last: bool) -> StepResult:
        """Run a step, and wait for the end of those of the other processes."""
        if not parts:
            refuse_missing_batch_by_hand()
        self._meetings.begin_step(step.weight_of(parts[0]))
        result = step(parts[0])
        self._meetings.wait_for_all(Kind.END)
        return result

    def _run_backward(self, call: BackwardCall) -> Any:
        """Run a backward of the user, and exchange its gradients."""
        # 1. In an evaluation, and within another backward, nothing is exchanged: what a checkpointed part or a hook
        #    computes belongs to the outer backward.
        if self._meetings.are_paused:
            return call.run()
        if is_in_backward():
            self._may_overlap = False
            return call.run()

        # 2. The user may have unfrozen parameters.
        if any(parameter.requires_grad for parameter in self._frozen):
            self._reducer.close()
            self._watch_parameters()

        # 3. `torch.autograd.grad` returns gradients, and leaves `.grad` as it is.
        self._may_overlap = self._may_overlap and not call.creates_graph
        if not call.accumulates:
            return self._returned.exchange(call, self._number_by_id)

        # 4. Run the backward. The factor of its gradients is known from the first meeting on.
        self._has_gradients = False
        self._announced = None
        self._overlaps = self._meetings.reference is not None and self._may_overlap
        try:
            call.run()
        except BaseException:
            if self._announced is not None:
                self._meetings.note_failure()
            raise

        # 5. Exchange its gradients. If it has reached no parameter, nobody waits for it.
        if self._has_gradients and call.creates_graph:
            self._returned.exchange_with_graph(self._parameters)
        elif self._has_gradients:
            announced = self._announced or self._meetings.announce(Kind.BACKWARD)
            self._meetings.exchange_gradients(announced)
        return None

    def _begin_exchange(self) -> None:
        """Note that a backward has reached a parameter, and begin the exchange if it overlaps with the backward."""
        self._has_gradients = True
        if self._overlaps and not self._meetings.are_paused:
            self._announced = self._meetings.announce(Kind.BACKWARD)
            self._reducer.begin(factor=self._meetings.factor)

    def _average_gradients(self, share: Share) -> None:
        """Make the gradients the means over all processes, of which some have run a backward."""
        if not self._reducer.is_open:
            self._reducer.begin(eager=False, factor=share.factor)
        missing = [parameter for parameter in self._parameters if parameter.grad is None]
        self._reducer.finish(1 / share.total)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        mark_exchanged(gradients)
        # The scaler has multiplied what only others have computed as well, if it has multiplied what is computed here.
        if missing and any(scaling_of(gradient) == "scaled" for gradient in gradients):
            for parameter in missing:
                if parameter.grad is not None:
                    mark_scaled(parameter.grad, "scaled")

    def paused(self) -> AbstractContextManager[None]:
        """Return a context manager for a step of an evaluation, in which nothing is exchanged."""
        return self._meetings.paused()

    def collect(self) -> None:
        """Do nothing: gradients are exchanged when their backward ends."""

    def finish(self, window: AccumulationWindow, optimizer: Optimizer) -> bool:
        """Do nothing: there are no windows in manual optimisation."""
        return False

    def close(self) -> None:
        """Release torch, the optimisers and the module."""
        self._release()
        self._steps.close()
        self._reducer.close()


def _optimizers_of(module: Any) -> list[Optimizer]:
    optimizers = module.optimizers(use_pl_optimizer=False)
    if isinstance(optimizers, list):
        return optimizers
    return [optimizers]
