"""`predict_memory`, in processes of their own."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import equipoise
from equipoise import ConfigurationError, predict_memory
from equipoise.extensions.common.planned_devices import PlannedDevice
from equipoise.extensions.planning.comparison import plan_strategies, recommend
from equipoise.extensions.planning.description.settings import StepSettings
from equipoise.extensions.planning.tracing.tracer import trace_step
from equipoise.strategies import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    DDPStrategy,
    SingleDeviceStrategy,
)
from tests.extensions.planning.steps import Step, Transformer, example_of, module_of, peak_of, recorded_really


class Late(LightningModule):
    """Builds its layers in `configure_model`: two terabytes, were they real."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(*(nn.Linear(2**17, 2**17) for _ in range(32)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Untraceable(Step):
    """Asks numpy for values."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = self.net(batch)
        if output.detach().numpy().max() > 1e9:
            raise ValueError("not reached")
        return output.square().mean()


@pytest.mark.slow
def test_a_module_and_a_loader_are_predicted_and_left_as_they_are() -> None:
    module = module_of("transformer")
    before = [parameter.detach().clone() for parameter in module.parameters()]
    loader = DataLoader(torch.randint(0, 200, (32, 12)), batch_size=8)
    prediction = predict_memory(module, loader, optimizer=torch.optim.SGD)
    assert prediction.batch_size == 8
    assert prediction.method == "traced"
    assert prediction.facts.optimizer_state == 0
    sent = pickle.loads(pickle.dumps(prediction))
    assert prediction.peak().nbytes == prediction.peak(8).nbytes < prediction.peak(9).nbytes == sent.peak(9).nbytes
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


@pytest.mark.slow
def test_a_module_without_memory_is_predicted() -> None:
    prediction = predict_memory(Late(), torch.empty(4, 2**17))
    assert prediction.facts.parameters == 32 * (2**34 + 2**17) * 4
    with torch.device("meta"):
        module = Step(Transformer())
    on_meta = predict_memory(module, example_of("transformer"))
    assert on_meta.facts.parameters == sum(parameter.nbytes for parameter in module.parameters())


class WithoutIndex(Step):
    """Takes a batch alone, as the trainer accepts it."""

    def training_step(self, batch: Tensor) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)


def test_a_step_without_the_index_is_predicted() -> None:
    example = torch.empty(4, 30)
    settings = StepSettings()
    net = nn.Linear(30, 5)
    expected = trace_step(lambda: Step(net), example, settings).peak(8).nbytes
    assert trace_step(lambda: WithoutIndex(net), example, settings).peak(8).nbytes == expected


def test_a_step_that_cannot_be_traced_is_measured() -> None:
    module = Untraceable(nn.Linear(6, 6))
    prediction = predict_memory(module, torch.rand(8, 6))
    assert prediction.method == "measured"
    assert f"{Path(__file__).name}:" in prediction.notes[0]
    assert prediction.notes[0].endswith("so real steps were run.")
    with pytest.raises(ConfigurationError, match=r"cannot be traced: test_prediction.py:\d+"):
        predict_memory(module, torch.rand(8, 6), measure=False)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs a LightningModule"):
        predict_memory(nn.Linear(2, 2), torch.rand(4, 2))
    with pytest.raises(ConfigurationError, match="the loader is empty"):
        predict_memory(module_of("perceptron"), DataLoader([], batch_size=2))
    with pytest.raises(ConfigurationError, match="timeout must be"):
        predict_memory(module_of("perceptron"), example_of("perceptron"), timeout=0)
    assert equipoise.predict_memory is predict_memory


@pytest.mark.thorough
def test_samples_of_the_balanced_strategy_follow_its_arguments() -> None:
    prediction = trace_step(lambda: module_of("perceptron"), example_of("perceptron"), StepSettings())
    arguments: list[dict[str, Any]] = [{"first_device_batch_size": 2}, {"shares": [1, 3, 2]}]
    strategies = [BalancedDataParallelStrategy(**each) for each in arguments]
    devices = [PlannedDevice(name="cpu", kind="cpu", memory=2**30)] * 3
    plans = plan_strategies(prediction, module_of("perceptron"), strategies, devices, 12)
    assert [[device.samples for device in plan.devices] for plan in plans] == [[2, 5, 5], [2, 6, 4]]


@pytest.mark.slow
def test_strategies_are_recommended_by_what_fits() -> None:
    module = module_of("transformer")
    example = example_of("transformer")
    settings = StepSettings()
    prediction = trace_step(lambda: module_of("transformer"), example, settings)
    strategies = [SingleDeviceStrategy(), DataParallelStrategy(), DDPStrategy()]

    def devices_of(nbytes: int) -> list[PlannedDevice]:
        return [PlannedDevice(name="cpu", kind="cpu", memory=nbytes)] * 2

    # 1. All have room.
    plans = plan_strategies(prediction, module, strategies, roomy := devices_of(2**30))
    assert [plan.fits for plan in plans] == [True] * 3
    assert recommend(plans, roomy, 4).overrides == ["strategy=ddp"]

    # 2. A batch that fits in halves alone.
    recorded = recorded_really(module_of("transformer"), example, 16, settings)
    devices = devices_of(peak_of(recorded) + 200_000)
    plans = plan_strategies(prediction, module, strategies, devices, 30)
    assert [plan.fits for plan in plans] == [False, True, False]
    assert recommend(plans, devices, 30).strategy == "dp"
    assert plans[1].largest_batch >= 30 > plans[0].largest_batch >= 16

    # 3. A batch that fits in parts alone, whose gradients live longer if they are accumulated.
    accumulated = replace(settings, accumulate_grad_batches=2)
    found = trace_step(lambda: module_of("transformer"), example, accumulated)
    longer = plan_strategies(found, module, strategies, devices, 80)
    plans = plan_strategies(prediction, module, strategies, devices, 80)
    assert not any(plan.fits for plan in plans)
    advice = recommend(plans, devices, 80, longer)
    values = dict(override.split("=") for override in advice.overrides)
    batches = int(values["trainer.accumulate_grad_batches"])
    smaller = int(values["data.batch_size"])
    assert batches * smaller >= 80 > batches * (smaller - 1)
    assert smaller <= {plan.strategy: plan.largest_batch for plan in longer}[advice.strategy]
    assert recommend(longer, devices, 80, (), 3).overrides[-1] == f"trainer.accumulate_grad_batches={3 * batches}"

    # 4. Nothing fits.
    devices = devices_of(1000)
    plans = plan_strategies(prediction, module, strategies, devices)
    assert recommend(plans, devices, 4).reason == "no strategy fits, not even with one sample"
