"""Several processes, each with a simulated device, compute what processes on the CPU compute."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import DDPStrategy, PipelineStrategy, Strategy
from tests.simulated.devices.installation import extension
from tests.simulated.devices.selection import on_the_host
from tests.support.equality import assert_equal
from tests.support.pipelines import quiet

FEATURES, CLASSES, SAMPLES = 6, 3, 22


class NotesLaunches(DDPStrategy):
    """Notes the number of operations before the gradients of a window are weighed."""

    before: ClassVar[int] = 0

    def finish_gradients(self, window: Any, optimizer: Any) -> bool | None:
        NotesLaunches.before = launches()
        return super().finish_gradients(window, optimizer)


class Network(L.LightningModule):
    """Logs its loss; on a device, notes how many operations end the gradients of a window.

    Args:
        layers: Number of hidden layers.
    """

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        hidden: list[nn.Module] = []
        for _ in range(layers):
            hidden += [nn.Tanh(), nn.Linear(8, 8)]
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), *hidden, nn.Tanh(), nn.Linear(8, CLASSES))
        self.devices: set[str] = set()
        self.ending_launches: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.devices.add(str(batch[0].device))
        loss = nn.functional.cross_entropy(self.net(batch[0].to(self.dtype)), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.ending_launches.append(launches() - NotesLaunches.before)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Skipping(Network):
    """All processes skip two of the batches: there is nothing to step with."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (1, 2) else loss


class Weighted(Network):
    """Its loss has a weight that is a tensor on the device, as a number of tokens is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "loss_weight": (batch[1] >= 0).sum()}


def launches() -> int:
    return sum(extension().launches(index) for index in range(extension().device_count()))


def trained(make: Callable[[], Network], strategy: Strategy, device_type: str, batch_size: int, **options: Any) -> Any:
    """Fit in two processes; return the module and the last logged values."""
    torch.manual_seed(5)
    module = make()
    draw = torch.Generator().manual_seed(6)
    data = TensorDataset(
        torch.randn(SAMPLES, FEATURES, generator=draw, dtype=torch.float64),
        torch.randint(CLASSES, (SAMPLES,), generator=draw),
    )
    trainer = quiet(accelerator=device_type, devices=2, strategy=strategy, max_epochs=2, **options)
    trainer.fit(module, DataLoader(data, batch_size))
    return module, {name: float(value) for name, value in trainer.callback_metrics.items()}


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp by torch": lambda: DDPStrategy(backend="gloo"),
    "ddp by our engine": lambda: DDPStrategy(engine="native", backend="gloo"),
    "ddp with unequal shares": lambda: DDPStrategy(shares=[3, 1], backend="gloo"),
    "pipeline": lambda: PipelineStrategy(engine="processes", micro_batches=2, cut_before=["net.2"]),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


def assert_same_fits(expected: Any, actual: Any) -> None:
    """Compare modules and logged values of two fits, within 1e-12 of their size."""
    (module, values), (other, other_values) = expected, actual
    assert_equal(module, other, 1e-12)
    assert_equal(values, other_values, 1e-12)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_compute_what_they_compute_on_the_host(strategy: str, options: str) -> None:
    make = STRATEGIES[strategy]
    with on_the_host():
        expected = trained(Network, make(), "cpu", 4, **OPTIONS[options])
    actual = trained(Network, make(), "cuda", 4, **OPTIONS[options])
    assert all(name.startswith("cuda") for name in actual[0].devices)
    assert_same_fits(expected, actual)


@pytest.mark.parametrize("engine", ["torch", "native"])
def test_a_step_that_all_processes_skip_is_skipped(engine: Any) -> None:
    """An optimiser with momentum or weight decay would move the weights by gradients of zero."""
    actual = trained(Skipping, DDPStrategy(engine=engine, backend="gloo"), "cuda", 3)
    with on_the_host():
        expected = trained(Skipping, DDPStrategy(engine=engine, backend="gloo"), "cpu", 3)
    assert_same_fits(expected, actual)


@pytest.mark.parametrize("engine", ["torch", "native"])
@pytest.mark.parametrize("make", [Network, Weighted])
def test_the_end_of_a_window_has_no_operation_for_each_parameter(make: type[Network], engine: Any) -> None:
    """Gradients are multiplied by a factor of float64: the last batch is shorter, or weights are known to devices."""
    ending = []
    for layers in (1, 6):
        strategy = NotesLaunches(engine=engine, backend="gloo")
        module, _ = trained(partial(make, layers), strategy, "cuda", 4, precision="32-true")
        ending.append(module.ending_launches)
    assert ending[0] == ending[1]
    assert max(ending[0]) > 0
