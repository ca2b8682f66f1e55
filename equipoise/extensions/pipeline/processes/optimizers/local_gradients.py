"""Gradients of each process of a pipeline: summed over replicas, scaled and unscaled."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from equipoise.interop.torch import foreach
from equipoise.parallel.communication.gradient_reducer import GradientReducer

__all__ = ["Number", "ReplicaSums", "scale_gradients", "unscale_gradients"]

# Number by which the workers of a pipeline know an optimiser; those of several that are stepped together.
Number = int | tuple[int, ...]


class ReplicaSums:
    """Sums the gradients of parameters over the processes of torch's default group, once per window.

    The buckets of a sum stay in memory until the parameters change.
    """

    def __init__(self) -> None:
        self._reducer: GradientReducer | None = None
        self._parameters: list[nn.Parameter] = []

    def sum(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the gradients be the sums over all processes; a parameter without a gradient in any of them gets none.

        Args:
            parameters: Parameters in the same order in all processes. Those that require no gradient are left out.
        """
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        if not trainable:
            # No process has any: all have the same parameters.
            return
        if self._reducer is None or not _are_same(trainable, self._parameters):
            self._reducer = GradientReducer(trainable, at_end=True)
            self._parameters = trainable
        self._reducer.begin(eager=False)
        self._reducer.finish()


def _are_same(parameters: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    if len(parameters) != len(others):
        return False
    return all(parameter is other for parameter, other in zip(parameters, others, strict=True))


def scale_gradients(parameters: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply the gradients of parameters by a factor."""
    foreach.multiply_([parameter.grad for parameter in parameters if parameter.grad is not None], factor)


def unscale_gradients(parameters: Sequence[Tensor], scale: float) -> bool:
    """Divide gradients by a loss scale as torch's scaler does, and return True if all of them were finite.

    Args:
        parameters: Parameters of one device, each of which has a gradient.
        scale: The loss scale.

    Example:
        >>> weight = torch.zeros(2)
        >>> weight.grad = torch.tensor([4.0, 2.0])
        >>> unscale_gradients([weight], 2.0), weight.grad
        (True, tensor([2., 1.]))
    """
    # A scaler raises an error if there are none.
    if not parameters:
        return True
    device = parameters[0].device
    scaler = GradScaler(device.type, init_scale=scale)
    # The first use creates the scale.
    scaler.scale(torch.zeros((), device=device))
    # The scaler steps an optimiser only if all gradients are finite.
    recorder: Any = _StepRecorder(parameters)
    scaler.unscale_(recorder)
    scaler.step(recorder)
    return bool(recorder.was_stepped)


class _StepRecorder:
    """The part of an optimiser that a scaler needs. It records whether the scaler steps it."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": parameters}]
        self.was_stepped = False

    def step(self) -> None:
        """Record a step."""
        self.was_stepped = True
