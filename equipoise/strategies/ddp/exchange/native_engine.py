"""Exchange of gradients by our own reducer, once per window in every case."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

from equipoise.interop.lightning.classes import base_of
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.communication.gradient_reducer import GradientReducer
from equipoise.parallel.step_protocols import NO_RESULT, StepResult, TrainingStep
from equipoise.strategies.distributed.window_totals import as_number, average_gradients

__all__ = ["NativeEngine", "has_one_backward"]


class NativeEngine:
    """Our own reducer, which exchanges gradients once per window.

    Args:
        module: The user's module, on its device.
        device: The device.
        options: `bucket_cap_mb`, the size of a bucket in MiB; other entries are ignored.
    """

    def __init__(self, module: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
        # An override may run backward several times, and only the last run completes a gradient.
        self._one_backward = has_one_backward(module)
        self._reducer = GradientReducer(module.parameters(), options["bucket_cap_mb"])

    def forward_backward(self, step: TrainingStep, parts: Any, last: bool) -> StepResult:
        """Compute the gradients of a batch; without parts, join the exchange only."""
        result = step(parts[0]) if parts else NO_RESULT
        if last:
            self._reducer.begin(step.total_with(result), eager=self._one_backward)
        step.backward(result)
        # A result without a loss runs no backward, after which the trainer would collect.
        self.collect()
        return result

    def collect(self) -> None:
        """Complete an exchange, after a backward and before its hooks, which read the exchanged gradients."""
        if self._reducer.is_open:
            self._reducer.finish()

    def finish(self, window: AccumulationWindow, optimizer: Optimizer) -> bool:
        """End a window; see `GradientExchange.finish`. The reducer has summed over the processes."""
        return average_gradients(window, optimizer, as_number(self._reducer.total()), 1)

    def break_off(self) -> bool:
        """End a failed attempt; gradients that were sent stay as they are, since those were complete.

        Returns:
            Whether anything was sent.
        """
        return self._reducer.break_off()

    def close(self) -> None:
        """Release the module."""
        self._reducer.close()


def has_one_backward(module: nn.Module) -> bool:
    """Return whether the module leaves the backward to the trainer; an override may run it several times."""
    stock_class = base_of(module, LightningModule)
    return getattr(type(module), "backward", None) is stock_class.backward
