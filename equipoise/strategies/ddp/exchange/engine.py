"""Interface of the engines that exchange gradients between processes."""

from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

from equipoise.interop.lightning.classes import base_of
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.step_protocols import StepResult, TrainingStep

__all__ = ["NO_RESULT", "Engine", "has_one_backward"]

# Result of a step in a process without a batch.
NO_RESULT = StepResult(None, 0, None)


class Engine(Protocol):
    """An exchange of gradients; constructed when the first batch is trained on."""

    def __init__(self, module: nn.Module, device: torch.device, options: dict[str, Any]) -> None: ...

    def forward_backward(self, step: TrainingStep, parts: Any, last: bool) -> StepResult:
        """Compute the gradients of a batch; without parts, join the exchange only."""

    def collect(self) -> None:
        """Complete an exchange; called after a backward and before its hooks, which read the exchanged gradients."""

    def finish(self, window: AccumulationWindow, optimizer: Optimizer) -> bool:
        """End a window; return whether the weights of all processes are 0."""

    def close(self) -> None:
        """Release the module."""


def has_one_backward(module: nn.Module) -> bool:
    """Return whether the module leaves the backward to the trainer; an override may run it several times."""
    stock_class = base_of(module, LightningModule)
    return getattr(type(module), "backward", None) is stock_class.backward
