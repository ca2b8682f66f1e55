"""A strategy that overrides the members of a step, with the types that the base class names."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from equipoise import ConfigurationError, PortableState, StepResult, Strategy
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.step_protocols import EvaluationStep, TrainingStep
from equipoise.precision import Precision
from equipoise.strategies.strategy import Transfer


class ScaledStrategy(Strategy):
    name = "scaled"

    def __init__(self, *, factor: float = 1.0) -> None:
        if factor <= 0:
            raise ConfigurationError(f"factor must be positive, not {factor}.")
        self.factor = factor
        self.batches = 0

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        super().connect(devices, num_nodes)

    def setup(self, module: nn.Module, precision: Precision) -> None:
        super().setup(module, precision)

    def batch_to_devices(self, batch: Any, transfer: Transfer) -> Sequence[Any]:
        return [transfer(batch, self.root_device)]

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        result = step(parts[0])
        step.backward(result)
        self.batches += 1
        return result

    def finish_gradients(self, window: AccumulationWindow, optimizer: Optimizer) -> bool | None:
        skipped = super().finish_gradients(window, optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.factor)
        return skipped

    def evaluate(self, step: EvaluationStep, parts: Sequence[Any]) -> Any:
        return step(parts[0])

    @property
    def portable(self) -> PortableState:
        return PortableState(self.own_state, self.load_own_state)

    def own_state(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_own_state(self, state: dict[str, Any]) -> None:
        self.batches = state.get("batches", 0)
