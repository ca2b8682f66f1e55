"""Which gradients of steps by hand are multiplied by the scale of the loss: those of `manual_backward`, no others."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from equipoise.errors import StepError
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.optimizers.gradient_marks import mark_scaled, scaling_of

__all__ = ["ScaledGradients"]


class ScaledGradients:
    """Notes which backward each gradient comes from, by hooks on the parameters.

    Where the hooks see no backward, as with shards, and where the user calls the scaler, all gradients count as scaled.

    Args:
        module: The user's module.
        scaler: The scaler of the loss.
    """

    def __init__(self, module: nn.Module, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._runs_scaled = False
        # By identity: the parameters that a scaled backward has reached since their last step.
        self._reached: set[int] = set()
        self._sees_backwards = False
        self._user_scales = False
        self._handles: list[Any] = []
        for parameter in module.parameters():
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(self._note))
        self._scale = scaler.scale
        scaler.scale = self._note_scale  # type: ignore[method-assign]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        vars(self._scaler).pop("scale", None)

    def as_scaled(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Return a backward that scales its loss, and whose gradients are noted as scaled."""

        def run(*args: Any, **kwargs: Any) -> None:
            self._runs_scaled = True
            try:
                backward(*args, **kwargs)
            finally:
                self._runs_scaled = False

        return run

    def _note_scale(self, outputs: Any) -> Any:
        self._user_scales = self._user_scales or not self._runs_scaled
        return self._scale(outputs)

    def _note(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._sees_backwards = True
        kind = "plain"
        if self._runs_scaled:
            kind = "scaled"
            self._reached.add(id(parameter))
        before = scaling_of(parameter.grad)
        mark_scaled(parameter.grad, kind if before in ("", kind) else "both")

    def are_scaled(self, optimizer: Optimizer) -> bool:
        """Return whether the gradients of an optimiser are to be divided by the scale.

        Raises:
            StepError: If only some are, or only a part of one.
        """
        if self._user_scales or not self._sees_backwards:
            return True
        kinds = {self._kind(parameter) for parameter in optimizer_parameters(optimizer) if parameter.grad is not None}
        if kinds > {"plain"} or "both" in kinds:
            raise StepError(
                "Gradients of one optimiser come from `self.manual_backward`, which multiplies the loss by the scale of"
                " precision='16-mixed', and from another backward, which does not. Call `self.manual_backward(loss)`"
                " for every loss of this optimiser."
            )
        return "scaled" in kinds

    def _kind(self, parameter: Tensor) -> str:
        assert parameter.grad is not None
        # What the user has assigned was computed from scaled gradients, if there were any.
        assigned = "scaled" if id(parameter) in self._reached else "plain"
        return scaling_of(parameter.grad) or assigned

    def settle(self, optimizer: Optimizer) -> None:
        """Forget the gradients of an optimiser after its step."""
        for parameter in optimizer_parameters(optimizer):
            self._reached.discard(id(parameter))
            if parameter.grad is not None:
                mark_scaled(parameter.grad, "")
