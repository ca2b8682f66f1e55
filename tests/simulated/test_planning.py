"""Predicted peaks of each device against those of the devices' allocators."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import BalancedDataParallelStrategy, DataParallelStrategy, PipelineStrategy, SingleDeviceStrategy
from equipoise.extensions.common.planned_devices import PlannedDevice
from equipoise.extensions.pipeline.schedule.schedule import Schedule
from equipoise.extensions.planning.comparison import plan_strategies
from equipoise.extensions.planning.description.settings import StepSettings
from equipoise.extensions.planning.tracing.tracer import trace_step
from equipoise.extensions.tuning import strategy_choice
from equipoise.extensions.tuning.trials import step_prediction
from equipoise.strategies import Strategy
from equipoise.trainer.auto_strategy_and_finders import choose_strategy
from equipoise.trainer.runtime.request import Request
from tests.extensions.planning.steps import Step
from tests.support.bounded_calls import call_here
from tests.support.pipelines import quiet

WIDTH = 48
BATCH_SIZE = 240
TOLERANCE = 0.05

STRATEGIES: dict[str, tuple[type[Strategy], dict[str, Any], int]] = {
    "one device": (SingleDeviceStrategy, {}, 1),
    "dp": (DataParallelStrategy, {}, 2),
    "balanced": (BalancedDataParallelStrategy, {"shares": [3, 1]}, 2),
    "1f1b": (PipelineStrategy, {"micro_batches": 4, "cut_before": ["net.3"]}, 2),
    "gpipe": (
        PipelineStrategy,
        {"micro_batches": 4, "cut_before": ["net.3"], "schedule": "gpipe"},
        2,
    ),
}


class Block(nn.Module):
    """A part that computes the same tensors on every device; dropout and attention do not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        return values + self.dense(self.norm(values))


def module_of(optimizer: str) -> Step:
    return Step(nn.Sequential(nn.Embedding(100, WIDTH), *(Block() for _ in range(5)), nn.Linear(WIDTH, 100)), optimizer)


class Peaks(L.Callback):
    """The peak of each device in the third step."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.nbytes = [torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_each_device(name: str, optimizer: str) -> None:
    kind, options, count = STRATEGIES[name]
    # 1. A run.
    before = [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())]
    peaks = Peaks()
    data = torch.randint(0, 100, (4 * BATCH_SIZE, 3))
    trainer = quiet(
        strategy=kind(**options), devices=["cpu"] * count, max_steps=4, precision="32-true", callbacks=[peaks]
    )
    trainer.fit(module_of(optimizer), DataLoader(data, BATCH_SIZE))
    actual = [peak - nbytes for peak, nbytes in zip(peaks.nbytes, before, strict=True)][:count]

    # 2. The prediction, as for GPUs.
    settings = StepSettings(device="cuda")
    prediction = trace_step(lambda: module_of(optimizer), data[:4], settings)
    devices = [PlannedDevice(name="gpu", kind="cuda", memory=2**40)] * count
    module = module_of(optimizer)
    (plan,) = plan_strategies(prediction, module, [kind(**options)], devices, BATCH_SIZE)
    expected = [device.peak.nbytes for device in plan.devices]
    print(name, optimizer, actual, expected)
    assert expected == pytest.approx(actual, rel=TOLERANCE)


# The table of a cut


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(64, 64))


def convolution() -> nn.Module:
    blocks: list[nn.Module] = []
    for before in (3, *[32] * 7):
        blocks += [nn.Conv2d(before, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32))


class CutPeaks(Peaks):
    """The same, with those that the cut predicts."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self.predicted = list(trainer.connected_strategy._run.network.cut.peaks)


# With the shape of what each takes.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "encoder": (encoder, (4, 32, 64)),
    "convolution": (convolution, (4, 3, 16, 16)),
}


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


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *(("encoder", "gpipe"), ("encoder", "interleaved_1f1b"), ("encoder", "interleaved_zero_bubble")),
        *(("convolution", "1f1b"), ("convolution", "looped_bfs"), ("convolution", "interleaved_zero_bubble")),
    ],
)
def test_the_table_of_a_cut(name: str, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own measurements, which know of no batch and no loss."""
    monkeypatch.setattr("equipoise.extensions.pipeline.planning.measured_cut.choose_cuts", evenly)
    monkeypatch.setattr("equipoise.extensions.pipeline.planning.measured_cut.merge_blocks", unmerged)
    make, (size, *rest) = NETWORKS[name]
    before = [torch.cuda.memory_allocated(index) for index in range(2)]
    peaks, strategy = CutPeaks(), PipelineStrategy(micro_batches=8, schedule=schedule)
    trainer = quiet(strategy=strategy, devices=["cpu"] * 2, callbacks=[peaks], precision="32-true", max_steps=3)
    trainer.fit(Step(make()), DataLoader(torch.randn(24 * size, *rest), 8 * size))  # type: ignore[arg-type]
    actual = [peak - nbytes for peak, nbytes in zip(peaks.nbytes, before, strict=True)]
    print(name, schedule, actual, peaks.predicted)
    assert peaks.predicted == pytest.approx(actual, rel=0.15)


def test_auto_reads_the_memory_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(strategy_choice, "rank_zero_info", told.append)
    # Another process has no simulated devices.
    monkeypatch.setattr(step_prediction, "call_bounded", call_here)
    data = torch.randint(0, 100, (BATCH_SIZE, 3))
    request = Request(TrainerFn.FITTING, module_of("adam"), loaders={"train": DataLoader(data, BATCH_SIZE)})
    trainer = quiet(devices=["cpu", "cpu"], precision="32-true")
    assert choose_strategy(trainer, request) is trainer.connected_strategy
    (line,) = told
    assert line.startswith(f'strategy="auto" is ddp: a batch of {BATCH_SIZE} is predicted to fit on each of 2 devices')
