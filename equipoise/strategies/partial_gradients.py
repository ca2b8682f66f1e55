"""Gradients of a part of a batch, which a step of automatic optimisation computes by itself."""

from collections.abc import Callable
from typing import Any

from torch import nn

from equipoise.errors import StepError
from equipoise.interop.distributed.backward_calls import BackwardCall, intercept_backwards
from equipoise.interop.lightning.self_log import CURRENT_HOOK

__all__ = ["refuse_partial_gradients"]

# The hooks from which the loss comes.
_HOOKS = ("training_step", "on_before_backward")


def refuse_partial_gradients(module: nn.Module, strategy: str) -> Callable[[], None]:
    """Refuse `torch.autograd.grad`, and `backward(inputs=...)`, for parameters in a step that is computed in parts.

    What the step computes from such gradients, as weights of several tasks, would be that of a part of the batch.

    Args:
        module: The module, which computes a part or more of each batch.
        strategy: The name of the strategy.

    Returns:
        A function that allows them again.
    """
    attributes = vars(module)

    def run(call: BackwardCall) -> Any:
        # A plain `backward` names no inputs: it is for all leaves.
        if call.inputs and attributes.get(CURRENT_HOOK) in _HOOKS:
            parameters = set(map(id, module.parameters()))
            if not parameters.isdisjoint(map(id, call.leaves())):
                raise StepError(
                    "`torch.autograd.grad`, or `backward(inputs=...)`, was asked for gradients of parameters in a step"
                    " of automatic optimisation."
                    f" Under strategy={strategy!r} they would be those of a part of the batch, so a loss that is"
                    " computed from them would differ from that of one device. Optimise by hand under strategy='ddp',"
                    " where they are the mean over all samples. Gradients that train nothing, and those"
                    " of single samples or tasks, come from `torch.func.grad`, or from a copy of the parameter."
                )
        return call.run()

    return intercept_backwards(run)
