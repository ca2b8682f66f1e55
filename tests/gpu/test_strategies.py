"""Every strategy trains on a GPU as one CPU does: gradients and weights in float64."""

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import BalancedDataParallelStrategy, DDPStrategy, PipelineStrategy, Strategy, Trainer
from equipoise.extensions.pipeline.schedule.schedule import SCHEDULES
from tests.gpu.runs import CPU, GPU, QUIET, fit, loader
from tests.support.batches import FEATURES, TOKENS, Batches
from tests.support.networks.transparency import Convolution, Masked, Mlp, Recurrent
from tests.support.one_device import assert_same_run

# Kernels of a GPU add numbers in another order than the CPU, and the optimiser makes the differences larger.
TOLERANCE = 1e-10

STRATEGIES: dict[str, tuple[Callable[[], Strategy | str], int]] = {
    "single_device": (lambda: "single_device", 1),
    "dp": (lambda: "dp", 2),
    "balanced": (lambda: BalancedDataParallelStrategy(shares=[2, 1, 3]), 3),
    "balanced, forward alone": (lambda: BalancedDataParallelStrategy(shares=[2, 3], parallelize="forward"), 2),
    "pipeline": (lambda: PipelineStrategy(micro_batches=3), 2),
}


class Normed(Mlp):
    """Batch statistics make samples depend on each other, so only the whole batch gives these gradients."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before batch statistics has no effect, and a gradient of rounding errors.
        self.net[1] = nn.Linear(TOKENS * FEATURES, 8, bias=False)
        self.net.insert(2, nn.BatchNorm1d(8))


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("make", "name"), [(Normed, "single_device"), *product((Mlp, Convolution, Recurrent, Masked), STRATEGIES)]
)
def test_training_equals_that_of_the_cpu(make: type[LightningModule], name: str) -> None:
    strategy, parts = STRATEGIES[name]
    assert_same_run(fit(make, CPU), fit(make, strategy=strategy(), parts=parts), TOLERANCE)


class Deep(Mlp):
    """Enough layers for several stages on each device."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
        self.net = nn.Sequential(*self.net[:4], *layers, self.net[4])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_of_the_pipeline(schedule: str) -> None:
    strategy = PipelineStrategy(micro_batches=4, schedule=schedule)
    assert_same_run(fit(Deep, CPU), fit(Deep, strategy=strategy, parts=2), TOLERANCE)


# The rest of the run


class Evaluated(Mlp):
    """Validates and predicts; keeps where its batches and its results were."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[torch.device] = set()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.places.add(batch["features"].device)
        self.log("val_loss", nn.functional.cross_entropy(self(batch["features"]), batch["label"]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch["features"])


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", STRATEGIES)
def test_evaluation_and_prediction(name: str) -> None:
    strategy, parts = STRATEGIES[name]
    torch.manual_seed(7)
    module = Evaluated()
    on_host = Trainer(devices=["cpu"], precision="64-true", **QUIET)
    on_gpu = Trainer(strategy=strategy(), devices=[GPU] * parts, precision="64-true", **QUIET)
    (expected,) = on_host.validate(module, loader(), verbose=False)
    expected_outputs = on_host.predict(module, loader())
    (actual,) = on_gpu.validate(module, loader(), verbose=False)
    outputs = on_gpu.predict(module, loader())
    assert module.places == {CPU, GPU}
    assert actual == pytest.approx(expected, rel=1e-12)
    for one, other in zip(expected_outputs, outputs, strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-12, atol=1e-12)


def test_the_second_gpu_is_current_while_it_trains() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")

    class Placing(Mlp):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.made = torch.zeros(1, device="cuda")
            return super().training_step(batch, batch_idx)

    second = torch.device("cuda", 1)
    module, _, _ = fit(Placing, second)
    assert module.made.device == second
    assert torch.cuda.current_device() == 0


# Several processes


def test_two_processes_on_one_gpu() -> None:
    torch.manual_seed(3)
    module = Mlp()
    expected = deepcopy(module)
    fit_samples(module, DDPStrategy(backend="gloo"), 2, 3, gradient_clip_val=0.05)
    fit_samples(expected, "single_device", 1, 6, gradient_clip_val=0.05)
    assert_close(module, expected)


@pytest.mark.not_simulated("no kernels of batch statistics over several processes")
def test_shared_batch_statistics() -> None:
    """Two processes on one device, over gloo: the statistics are those of both, and the layers come back."""
    torch.manual_seed(3)
    module = Normed()
    expected = deepcopy(module)
    fit_samples(module, DDPStrategy(backend="gloo"), 2, 3, sync_batchnorm=True)
    fit_samples(expected, "single_device", 1, 6)
    assert type(module.net[2]) is nn.BatchNorm1d
    torch.testing.assert_close(module.net[2].running_mean, expected.net[2].running_mean)
    assert_close(module, expected)


def fit_samples(module: Any, strategy: Strategy | str, processes: int, size: int, **options: Any) -> None:
    """Train on twelve samples, in batches of `size` for each process."""
    (batch,) = Batches([12])
    samples = [{"features": batch["features"][index], "label": batch["label"][index]} for index in range(12)]
    trainer = Trainer(
        strategy=strategy, devices=[GPU] * processes, precision="64-true", max_epochs=1, **QUIET, **options
    )
    trainer.fit(module, DataLoader(samples, batch_size=size))  # type: ignore[arg-type]


def assert_close(module: nn.Module, expected: nn.Module) -> None:
    for mine, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)
