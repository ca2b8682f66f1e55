"""The stages of a pipeline, cut out of a recorded step."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import ConfigurationError, EnsembleStrategy, PipelineStrategy
from equipoise.extensions.common.device_loads import Part
from equipoise.extensions.common.planned_devices import PlannedDevice
from equipoise.extensions.planning.comparison import plan_strategies
from equipoise.extensions.planning.description.settings import StepSettings
from equipoise.extensions.planning.description.strategies import device_loads
from equipoise.extensions.planning.peaks.memory_prediction import MemoryPrediction
from equipoise.extensions.planning.tracing.tracer import trace_step
from tests.extensions.planning.steps import Step

WIDTH = 32
WEIGHT = WIDTH * WIDTH * 4  # bytes of a layer's weight
PARAMETERS = WEIGHT + WIDTH * 4  # bytes of a layer
DEVICE = PlannedDevice(name="cpu", kind="cpu", memory=2**40)


def layers(count: int = 4) -> Step:
    """Linear layers, each of which saves its input alone."""
    return Step(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))), "sgd")


@cache
def prediction(count: int = 4) -> MemoryPrediction:
    found = trace_step(lambda: layers(count), torch.rand(8, WIDTH), StepSettings())
    assert found.method == "traced"
    return found


def peaks(strategy: PipelineStrategy, devices: int, batch_size: int, count: int = 4) -> list[Mapping[Part, int]]:
    (plan,) = plan_strategies(prediction(count), layers(count), [strategy], [DEVICE] * devices, batch_size)
    assert plan.reason is None
    return [device.peak.parts for device in plan.devices]


def test_each_device_has_its_layers() -> None:
    first, second = peaks(PipelineStrategy(cut_before=["net.3"]), 2, 8)
    assert first["parameter"] == 3 * PARAMETERS
    assert second["parameter"] == PARAMETERS
    # Gradients of the second micro-batch are added to those of the first, one at a time.
    assert first["gradient"] == 3 * PARAMETERS + WEIGHT
    assert second["gradient"] == PARAMETERS + WEIGHT
    assert first["optimizer state"] == 3 * PARAMETERS
    assert "batch" in second
    assert "batch" not in first


def test_a_step_of_the_optimiser_needs_no_more_than_for_the_largest_weight_of_its_stage() -> None:
    module = Step(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)))
    found = trace_step(lambda: module, torch.rand(4 * 32, WIDTH), StepSettings())
    strategy = PipelineStrategy(micro_batches=4, cut_before=["net.1"])
    (plan,) = plan_strategies(found, module, [strategy], [DEVICE] * 2)
    weight = 8 * WIDTH * 4
    passing = 32 * WIDTH * 4
    # Weights, gradients and two states with their counts, the batch, and a gradient on its way to the stage before.
    resting = 4 * (weight + 8 * 4) + 2 * 4 + 4 * passing + passing
    # AdamW makes a root, and adds epsilon to it.
    assert plan.devices[1].peak.phases["optimizer step"] == pytest.approx(resting + 2 * weight, abs=0.5 * weight)


class Scaled(nn.Sequential):
    """Layers between two products of their own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        scaled: Tensor = super().forward(value * self.scale) * self.scale
        return scaled


def test_a_parameter_of_all_stages_is_in_the_first() -> None:
    module = Step(Scaled(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))))
    found = trace_step(lambda: module, torch.rand(8, WIDTH), StepSettings())
    (plan,) = plan_strategies(found, module, [PipelineStrategy(cut_before=["net.1"])], [DEVICE] * 2)
    assert [device.peak.parts["parameter"] for device in plan.devices] == [PARAMETERS + WIDTH * 4, PARAMETERS]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_stage_holds_the_micro_batches_in_flight(schedule: str) -> None:
    """A stage in the middle holds the outputs of its layers for each micro-batch in flight."""
    strategy = PipelineStrategy(schedule=schedule, micro_batches=5, cut_before=["net.1", "net.3"])
    (plan,) = plan_strategies(prediction(), layers(), [strategy], [DEVICE] * 3, 5 * 130)
    output = 130 * WIDTH * 4
    in_flight = {"1f1b": 2, "gpipe": 5}[schedule]
    # Two layers, the outputs of which the next one saves. With 1f1b a backward comes before the last forward, so a
    # gradient is on its way to the stage before.
    activations = in_flight * 2 * output
    on_its_way = {"1f1b": output, "gpipe": 0}[schedule]
    resting = 3 * 2 * PARAMETERS
    assert plan.devices[1].peak.phases["forward"] == resting + activations + on_its_way


def test_copies_pass_between_stages_of_gpus() -> None:
    """Devices of a CPU share it, but for a gradient on its way to the stage before; others copy their inputs."""
    passing = 10 * WIDTH * 4
    strategy = PipelineStrategy(schedule="gpipe", micro_batches=4, cut_before=["net.2"])
    shared = peaks(strategy, 2, 40)
    assert [parts.get("copy", 0) for parts in shared] == [0, passing]
    gpus = [PlannedDevice(name="gpu", kind="cuda", memory=2**40)] * 2
    (plan,) = plan_strategies(prediction(), layers(), [strategy], gpus, 40)
    copies = [device.peak.parts.get("copy", 0) for device in plan.devices]
    # Inputs of four micro-batches in the first backward, rounded up to 512 bytes each, which 1280 bytes are not.
    assert copies == [0, 4 * 1536]


def test_stages_of_fewer_samples_than_micro_batches() -> None:
    first, second = peaks(PipelineStrategy(micro_batches=8, cut_before=["net.2"]), 2, 1)
    assert first["parameter"] == second["parameter"] == 2 * PARAMETERS


def test_several_stages_on_each_device() -> None:
    for schedule in ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"):
        first, second = peaks(PipelineStrategy(schedule=schedule, micro_batches=4), 2, 16)
        assert first["parameter"] == second["parameter"] == 2 * PARAMETERS


def test_networks_that_cannot_be_cut_are_refused() -> None:
    for strategy, message in (
        (PipelineStrategy(cut_before=["net.9"]), "cut_before names 'net.9', which the training step does not call"),
        (PipelineStrategy(cut_before=["net.1", "net.2"]), "as many names as there are cuts, 1, not"),
    ):
        (plan,) = plan_strategies(prediction(), layers(), [strategy], [DEVICE] * 2)
        assert plan.reason is not None
        assert message in plan.reason
        assert not plan.fits
    (plan,) = plan_strategies(prediction(2), layers(2), [PipelineStrategy()], [DEVICE] * 5)
    assert plan.reason == "the network has too few parts for 5 stages"
    with pytest.raises(ConfigurationError, match="two devices"):
        device_loads(PipelineStrategy(), [DEVICE], layers(), prediction().facts)


def test_a_strategy_that_does_not_say_what_its_devices_hold() -> None:
    (plan,) = plan_strategies(prediction(), layers(), [EnsembleStrategy(members=2)], [DEVICE])
    assert plan.reason == "strategy='ensemble' does not say what its devices hold"
    assert not plan.fits


def test_every_replica_has_the_same() -> None:
    strategy = PipelineStrategy(engine="processes", replicas=2, cut_before=["net.2"])
    planned = device_loads(strategy, [DEVICE] * 4, layers(), prediction().facts)
    assert planned.batches == 2
    assert planned.loads[:2] == planned.loads[2:]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("device", "together", "momentary"),
    [("cpu", None, 2 * 8 * 8 * 4), ("cuda", None, 2 * (8 * 8 + 8) * 4), ("cuda", False, 2 * 8 * 8 * 4)],
)
def test_the_memory_that_an_optimiser_needs_for_a_moment(device: str, together: bool | None, momentary: int) -> None:
    """One parameter after the other needs as much as the largest of the stage, and all together as much as all."""

    class Chosen(Step):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), foreach=together)

    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 8))
    found = trace_step(lambda: Chosen(net), torch.rand(8, 8), StepSettings(device=device))
    strategy = PipelineStrategy(micro_batches=4, cut_before=["net.1"])
    (plan,) = plan_strategies(found, Chosen(net), [strategy], [DEVICE] * 2, 8)
    # Weights, gradients and averages; the numbers of steps.
    resting = 4 * (8 * 8 + 8) * 4 + 2 * 4
    assert plan.devices[0].peak.phases["optimizer step"] == resting + momentary
