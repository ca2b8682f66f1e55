"""Predictions against steps of the trainer itself, as MemoryLogger records them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import DDPStrategy, FSDPStrategy, MemoryLogger, PipelineStrategy, SingleDeviceStrategy, Trainer
from equipoise.extensions.common.planned_devices import PlannedDevice
from equipoise.extensions.comparison.bench.probe import DeviceProbe
from equipoise.extensions.planning.comparison import plan_strategies
from equipoise.extensions.planning.description.settings import StepSettings
from equipoise.extensions.planning.tracing.tracer import trace_step
from tests.extensions.planning.steps import WIDTH, Adapted, Step, example_of, module_of, quantization
from tests.support.pipelines import quiet
from tests.support.quiet import QUIET

BATCH_SIZE = 8
EXAMPLE = torch.rand(8 * BATCH_SIZE, WIDTH)


def recorded(
    module: Any, example: Tensor, folder: Path, callbacks: Any = (), batch_size: int = BATCH_SIZE, **options: Any
) -> int:
    """The largest peak of the main process in the second step."""
    memory = MemoryLogger(detail="modules", leaks=False)
    data = example.repeat(32, *[1] * (example.ndim - 1))
    settings = {**QUIET, "accelerator": "cpu", "max_steps": 4, "default_root_dir": folder}
    trainer = Trainer(**settings, callbacks=[memory, *callbacks], **options)
    trainer.fit(module, DataLoader(data, batch_size=batch_size))
    return max(composition.nbytes for composition in memory.compositions)


def planned(
    make: Callable[[], Step],
    example: Tensor,
    strategy: Any,
    devices: int,
    batch_size: int = BATCH_SIZE,
    **options: Any,
) -> list[int]:
    """The predicted peak of each device."""
    modules: list[Step] = []

    def build() -> Step:
        modules.append(make())
        return modules[-1]

    prediction = trace_step(build, example, StepSettings(**options))
    places = [PlannedDevice(name="cpu", kind="cpu", memory=2**40)] * devices
    # Callbacks have changed the module that was traced.
    (plan,) = plan_strategies(prediction, modules[0], [strategy], places, batch_size)
    assert plan.reason is None
    return [device.peak.nbytes for device in plan.devices]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("perceptron", {}),
        ("transformer", {"accumulate_grad_batches": 2}),
        ("convolutions", {"precision": "bf16-mixed"}),
    ],
)
def test_the_planned_peak_of_one_device_is_the_measured_one(name: str, options: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    actual = recorded(module_of(name), example_of(name), tmp_path, devices=1, **options)
    expected = planned(lambda: module_of(name), example_of(name), SingleDeviceStrategy(), 1, **options)
    assert expected == [pytest.approx(actual, rel=0.005)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "native"])
def test_the_planned_peak_of_processes_with_buckets_is_the_measured_one(engine: Any, tmp_path: Path) -> None:
    example = example_of("transformer")
    actual = recorded(module_of("transformer"), example, tmp_path, devices=2, strategy=DDPStrategy(engine=engine))
    expected = planned(lambda: module_of("transformer"), example, DDPStrategy(engine=engine), 2)
    assert expected[0] == pytest.approx(actual, rel=0.05)


def module_of_blocks(kind: str | None, blocks: int) -> Step:
    """Blocks with adapters for weights in few bits; else blocks that are trained, between two layers of the root."""
    if kind is not None:
        return Step(nn.Sequential(*[Adapted() for _ in range(blocks)]))
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(blocks)]
    return Step(nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 16)))


def callbacks_of(kind: str | None) -> list[Any]:
    return [] if kind is None else [quantization(kind)]


def planned_for_blocks(kind: str | None, blocks: int, strategy: Any) -> list[int]:
    callbacks = tuple(callbacks_of(kind))
    return planned(
        lambda: module_of_blocks(kind, blocks), EXAMPLE, strategy, 2, batch_size=len(EXAMPLE), callbacks=callbacks
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "blocks"), [(None, 24), ("nf4", 6), ("int8", 2)])
def test_the_planned_peak_of_shards_is_the_measured_one(kind: str | None, blocks: int, tmp_path: Path) -> None:
    """A step of few units is at its peak while one of them is gathered."""
    options = {"devices": 2, "strategy": FSDPStrategy()}
    actual = recorded(module_of_blocks(kind, blocks), EXAMPLE, tmp_path, callbacks_of(kind), len(EXAMPLE), **options)
    assert planned_for_blocks(kind, blocks, FSDPStrategy())[0] == pytest.approx(actual, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "kind", "schedule"), [(2, None, "1f1b"), (6, None, "gpipe"), (2, "nf4", "gpipe"), (6, "int8", "1f1b")]
)
def test_the_planned_peak_of_each_stage_is_the_measured_one(
    blocks: int, kind: str | None, schedule: Any, tmp_path: Path
) -> None:
    """Two devices of one name, which the probe of comparisons tells apart.

    The optimiser of a stage of one layer needs more for a moment than the backward.
    """
    strategy = PipelineStrategy(schedule=schedule, micro_batches=4, cut_before=[f"net.{blocks // 2}"])
    steps = {"settling_steps": 2, "timed_steps": 1, "compared_step": -1}
    probe = DeviceProbe(tmp_path, ["cpu", "cpu"], root=1, home=1, **steps)
    options = {"max_steps": 5, "precision": "32-true", "callbacks": [probe, *callbacks_of(kind)]}
    trainer = quiet(strategy=strategy, devices=["cpu", "cpu"], **options)
    trainer.fit(module_of_blocks(kind, blocks), DataLoader(EXAMPLE.repeat(8, 1), batch_size=len(EXAMPLE)))
    assert planned_for_blocks(kind, blocks, strategy) == pytest.approx(list(probe.peaks.values()), rel=0.01)
