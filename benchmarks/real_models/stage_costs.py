"""Time and memory of stages as they ran, beside those that the table of the cut predicts.

All stages are on the CPU here. So what is allocated while a stage computes counts as its device's, and tensors that
pass between stages are copied, as they are between devices.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

import lightning as L
from torch import Tensor, nn

from equipoise.extensions.pipeline.execution import stage_graphs, threaded_engine
from equipoise.memory.profile import ledger

__all__ = ["StageCosts", "devices_apart"]

_STEP = 1
"""The measured step: gradients and the optimiser's state are there."""


class _Devices:
    """The device of every tensor: that of the stage that computes now, or that of a parameter's stage."""

    def __init__(self) -> None:
        self.present = "outside"
        self.homes: dict[int, str] = {}


_devices = _Devices()


class _Entry(ledger.Entry):
    __slots__ = ()

    def __init__(self, tensor: Tensor, *args: Any) -> None:
        super().__init__(tensor, *args)
        self.device = _devices.homes.get(id(tensor), _devices.present)


def _name(stage: int) -> str:
    return f"device {stage}"


@contextmanager
def devices_apart() -> Iterator[None]:
    """Let the ledger tell the devices of stages apart within the context."""
    compute = threaded_engine.StepRun.compute

    def noted(run: Any, stage: int, action: Any) -> None:
        outer = _devices.present
        _devices.present = _name(stage)
        try:
            compute(run, stage, action)
        finally:
            _devices.present = outer

    with (
        mock.patch.object(threaded_engine.StepRun, "compute", noted),
        mock.patch.object(stage_graphs, "to_device", lambda tensor, device: tensor.clone()),
        mock.patch.object(ledger, "Entry", _Entry),
    ):
        yield
    _devices.homes.clear()


class StageCosts(L.Callback):
    """Measures the second step.

    Attributes:
        found: Ratios of predicted to measured costs, the worst of all devices; empty before.
    """

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._ledger: Any = None
        self._trained: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        network = trainer.strategy._run.network
        if batch_idx != _STEP or not network.cut.stages:
            return
        self._settle(module, trainer.optimizers[0], network.placement._stages, len(network.cut.stages))
        self._ledger = ledger.Ledger(module, trainer.optimizers)
        self._ledger.start()
        # Gradients are about to be freed, and other tensors get their identities.
        for tensor in module.parameters():
            if tensor.grad is not None:
                _devices.homes.pop(id(tensor.grad), None)

    def _settle(self, module: nn.Module, optimizer: Any, stages: dict[int, int], count: int) -> None:
        """Note that parameters, their gradients and their states are on the device of their stage."""
        self._trained = [0] * count
        for tensor in (*module.parameters(), *module.buffers()):
            stage = stages[id(tensor)]
            if tensor.requires_grad:
                self._trained[stage] += tensor.nbytes
            for one in (tensor, tensor.grad, *optimizer.state.get(tensor, {}).values()):
                if one is not None:
                    _devices.homes[id(one)] = _name(stage)

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        if self._ledger is None:
            return
        self._ledger.stop()
        cut = trainer.strategy._run.network.cut
        # The prediction assumes two values of state for each parameter, as Adam has; momentum is one.
        peaks = [self._ledger.peak(_name(stage)).nbytes + extra for stage, extra in enumerate(self._trained)]
        self._ledger = None
        self.found["memory"] = _farthest(p / m for p, m in zip(cut.peaks, peaks, strict=True))
        predicted = [stage.forward + stage.backward for stage in cut.stages]
        measured = _seconds(trainer.strategy.timeline)
        self.found["to_mean"] = max(measured) * len(measured) / sum(measured)
        self.found["time"] = sum(predicted) / sum(measured)


def _farthest(ratios: Iterator[float]) -> float:
    """Return the ratio that is farthest from 1."""
    return max(ratios, key=lambda ratio: max(ratio, 1 / ratio))


def _seconds(timeline: Any) -> list[float]:
    """Return the median seconds of each stage for a micro-batch, forward and backward."""
    seconds = [0.0] * timeline.stages
    for stage in range(timeline.stages):
        for backward in (False, True):
            spans = [span for span in timeline.spans if span.stage == stage and span.action.backward is backward]
            seconds[stage] += median(span.end - span.begin for span in spans)
    return seconds
