"""Predictions of the table for each device's memory, beside the measurements of the ledger."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import PipelineStrategy
from equipoise.extensions.pipeline.execution import stage_graphs, threaded_engine
from equipoise.memory.profile import ledger
from tests.support.networks.layers import Task
from tests.support.pipelines import quiet

MICRO_BATCHES = 8


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(64, 64))


def convolution() -> nn.Module:
    blocks: list[nn.Module] = []
    for before in (3, *[32] * 7):
        blocks += [nn.Conv2d(before, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32))


# With the shape of what each takes.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (transformer, (4, 32, 64)),
    "convolution": (convolution, (4, 3, 16, 16)),
}


class Module(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class StageByStage:
    """Lets the ledger tell devices apart, which all are the CPU here, and stages copy what devices would copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.now, self.homes, self.count = "outside", dict[int, str](), count
        compute, stages = threaded_engine.StepRun.compute, self

        def noted(run: Any, stage: int, action: Any) -> None:
            outer, stages.now = stages.now, stages.name(stage)
            try:
                compute(run, stage, action)
            finally:
                stages.now = outer

        class Entry(ledger.Entry):
            __slots__ = ()

            def __init__(self, tensor: Tensor, *args: Any) -> None:
                super().__init__(tensor, *args)
                self.device = stages.homes.get(id(tensor), stages.now)

        monkeypatch.setattr(threaded_engine.StepRun, "compute", noted)
        monkeypatch.setattr(stage_graphs, "to_device", lambda tensor, device: tensor.clone())
        monkeypatch.setattr(ledger, "Entry", Entry)

    def name(self, stage: int) -> str:
        return f"device {stage % self.count}"

    def settle(self, module: nn.Module, optimizer: Any, stage_of: dict[int, int]) -> None:
        """Parameters, gradients and the optimiser's state belong to the stage of the parameter."""
        for tensor in (*module.parameters(), *module.buffers()):
            home = self.name(stage_of[id(tensor)])
            of_it = [tensor, tensor.grad, *optimizer.state.get(tensor, {}).values()]
            self.homes.update({id(one): home for one in of_it if one is not None})

    def forget_gradients(self, module: nn.Module) -> None:
        """Forget where gradients lie, before they are freed and other tensors get their identities."""
        for tensor in module.parameters():
            if tensor.grad is not None:
                self.homes.pop(id(tensor.grad))


class Watch(L.Callback):
    """Measures the second step, when gradients and the optimiser's state are there."""

    def __init__(self, stages: StageByStage, strategy: PipelineStrategy, count: int) -> None:
        self.stages, self.strategy, self.count = stages, strategy, count
        self.measured: list[int] = []
        self.predicted: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        assert self.strategy._run is not None
        network = self.strategy._run.network
        if batch_idx == 1:
            assert network.cut is not None
            self.stages.settle(module, trainer.optimizers[0], network.placement._stages)
            self.predicted = list(network.cut.peaks)
            alone = [stage.memory for stage in network.cut.stages]
            whole = "zero" not in self.strategy.schedule
            for own, peak in zip(alone, self.predicted, strict=False):
                assert len(alone) > self.count or (own == peak if whole else own >= peak)
            self.ledger = ledger.Ledger(module, trainer.optimizers)
            self.ledger.start()
            self.stages.forget_gradients(module)
        elif batch_idx == 2:
            self.ledger.stop()
            self.measured = [self.ledger.peak(f"device {device}").nbytes for device in range(self.count)]


def evenly(costs: Any) -> list[int]:
    """Cuts by number, so that the test measures the same stages every time."""
    blocks = costs.blocks
    ends: list[int] = []
    for index in range(len(costs.devices)):
        first = max([len(blocks) * (index + 1) // len(costs.devices), *(end + 1 for end in ends[-1:])])
        ends.append(next(at for at in range(first, len(blocks) + 1) if blocks[at - 1].may_end))
    return ends


def unmerged(blocks: Any, *_: Any) -> Any:
    """Every call for itself: which are put together depends on how long they took."""
    return list(blocks), list(range(1, len(blocks) + 1))


# Each schedule with its numbers of devices and stages, and each network with several.
PLANS = [
    *(("convolution", "gpipe", 2, 1), ("transformer", "gpipe", 4, 1), ("convolution", "1f1b", 4, 1)),
    *(("transformer", "interleaved_1f1b", 2, 3), ("convolution", "looped_bfs", 2, 2)),
    *(("convolution", "interleaved_zero_bubble", 2, 2), ("transformer", "interleaved_zero_bubble", 3, 1)),
]


@pytest.mark.quick_cases(2)
@pytest.mark.thorough
@pytest.mark.parametrize(("name", "schedule", "devices", "each"), PLANS)
def test_predicted_peaks_are_those_that_are_measured(name, schedule, devices, each, monkeypatch):
    monkeypatch.setattr("equipoise.extensions.pipeline.planning.measured_cut.choose_cuts", evenly)
    monkeypatch.setattr("equipoise.extensions.pipeline.planning.measured_cut.merge_blocks", unmerged)
    torch.manual_seed(0)
    strategy = PipelineStrategy(micro_batches=MICRO_BATCHES, schedule=schedule, stages_per_device=each)
    watch = Watch(StageByStage(monkeypatch, devices), strategy, devices)
    trainer = quiet(strategy=strategy, devices=["cpu"] * devices, callbacks=[watch], precision="32-true", max_steps=3)
    make, (size, *rest) = NETWORKS[name]
    data = torch.randn(3 * MICRO_BATCHES * size, *rest)
    trainer.fit(Module(make()), DataLoader(data, batch_size=MICRO_BATCHES * size))  # type: ignore[arg-type]
    for device, (predicted, measured) in enumerate(zip(watch.predicted, watch.measured, strict=True)):
        share = predicted / measured
        print(f"{name} {schedule} device {device}: predicted {predicted}, measured {measured}, {share:.2f}")
        assert 0.85 < share < 1.15
