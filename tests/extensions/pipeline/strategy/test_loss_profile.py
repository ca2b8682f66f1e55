"""Work of a step after the network's call counts to the last stage, and measuring it leaves no trace."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from equipoise import PipelineStrategy, StepError, Trainer
from equipoise.extensions.pipeline.planning.cut import CutOptions
from equipoise.extensions.pipeline.planning.loss_profile import LossProfile
from equipoise.extensions.pipeline.planning.measured_cut import _on_device_of_calls
from equipoise.extensions.pipeline.planning.profile import used_tensors
from equipoise.extensions.pipeline.planning.stage_costs import Block
from equipoise.parallel.step_protocols import StepResult
from tests.conftest import ignoring
from tests.support.pipelines import stay_whole
from tests.support.quiet import QUIET
from tests.support.traces import traced

pytestmark = ignoring()

WIDTH, LAYERS = 4, 8


class Clock:
    """Time that passes where somebody says so."""

    seconds = 0.0

    def __call__(self, device: torch.device) -> float:
        return self.seconds


CLOCK = Clock()


class Takes(torch.autograd.Function):
    """Takes so many seconds forward, and twice as many backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        CLOCK.seconds += seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        CLOCK.seconds += 2 * ctx.seconds
        return gradient, None


class Layer(nn.Module):
    """Takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        stay_whole(value)
        return Takes.apply(torch.tanh(self.linear(value)), 1.0)


class Model(L.LightningModule):
    """Its loss takes some seconds, of which a part in a layer beside the network.

    Args:
        seconds: How many.
        by_self: Whether the step calls the module itself.
    """

    def __init__(self, seconds: float = 0.0, *, by_self: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 3)
        self.metric = MeanMetric()
        self.seconds, self.by_self = seconds, by_self
        self.calls, self.seen, self.noise = 0, list[int](), list[float]()

    def forward(self, batch: Tensor) -> dict[str, Any]:
        return {"hidden": self.net(batch), "others": [batch.size(0), (batch.mean(),)]}

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        made = self(batch)["hidden"] if self.by_self else self.net(batch)
        loss = Takes.apply(self.head(made).square().mean(), self.seconds) + self.head.weight.square().sum()
        self.calls += 1
        self.seen.append(batch_idx)
        self.noise.append(float(torch.rand(())))
        self.metric.update(loss.detach())
        self.log("loss", loss, on_epoch=True)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss * (1 + self.noise[-1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.extensions.pipeline.planning.loss_profile.now", CLOCK)
    monkeypatch.setattr("equipoise.extensions.pipeline.planning.profile.now", CLOCK)


def fit(module: L.LightningModule, stages: int = 2, *, val: bool = False, **options: Any) -> Trainer:
    trainer = Trainer(
        strategy=PipelineStrategy(**{"micro_batches": 4, **options}),
        devices=["cpu"] * stages,
        precision="64-true",
        max_epochs=2,
        **QUIET,
    )
    draw = torch.Generator().manual_seed(5)
    batches = [torch.randn(8, WIDTH, generator=draw, dtype=torch.float64) for _ in range(3)]
    torch.manual_seed(11)
    trainer.fit(module, *(DataLoader(batches, batch_size=None) for _ in range(1 + val)))  # type: ignore[arg-type]
    return trainer


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("by_self", [False, True])
@pytest.mark.parametrize(
    ("seconds", "stages", "expected"),
    [
        (0.0, 2, ["net.4"]),
        (4.0, 2, ["net.6"]),
        (7.0, 2, ["net.7"]),
        (100.0, 2, ["net.7"]),
        (1.0, 3, ["net.3", "net.6"]),
    ],
)
@pytest.mark.usefixtures("clock")
def test_the_last_stage_gets_less(
    seconds: float, stages: int, expected: list[str], by_self: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = fit(Model(seconds, by_self=by_self), stages)
    assert trainer.connected_strategy.portable.strategy_state()["cut_before"] == expected
    last = LAYERS - int(expected[-1].removeprefix("net."))
    assert f"{(3 * last + 3 * seconds) * 1000:.2f} ms" in caplog.text
    assert f"last stage are {3 * seconds * 1000:.2f} ms for what the step computes after the call" in caplog.text


class Pops(Model):
    """Takes what it computes with out of its batch."""

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> dict[str, Tensor]:
        return {"features": batch}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch.pop("features"), batch_idx)


@pytest.mark.usefixtures("clock")
def test_a_step_that_takes_something_out_of_its_batch(caplog: pytest.LogCaptureFixture) -> None:
    trainer = fit(Pops(4.0, by_self=True))
    assert trainer.connected_strategy.portable.strategy_state()["cut_before"] == ["net.6"]
    assert "for what the step computes after the call" in caplog.text


class Validated(Model):
    """Is checked in the validation before it is trained; there it takes another way."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, by_self=True)
        self.values: list[float] = []

    def forward(self, batch: Tensor) -> dict[str, Any]:
        made = super().forward(batch)
        return made if self.training else {**made, "hidden": made["hidden"] * made["others"][1][0]}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.values.append(float(self(batch)["hidden"].square().mean()))


@pytest.mark.usefixtures("clock")
def test_a_check_before_training_does_not_decide(caplog: pytest.LogCaptureFixture) -> None:
    module = Validated(4.0)
    trainer = fit(module, val=True)
    assert trainer.connected_strategy.portable.strategy_state()["cut_before"] == ["net.6"]
    assert caplog.text.count("is cut into stages") == 1
    given = Validated(4.0)
    fit(given, val=True, cut_before=["net.6"])
    assert module.values == given.values
    assert len(module.values) == 2 + 2 * 3
    for name, value in given.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


@pytest.mark.usefixtures("clock")
def test_the_bubble_is_that_of_the_whole_step(caplog: pytest.LogCaptureFixture) -> None:
    """Two stages of 18 seconds each, four micro-batches: a fifth is idle; without the loss it would have been more."""
    fit(Model(4.0))
    assert "stages idle 20% of the time" in caplog.text


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_measuring_leaves_no_trace(engine: str) -> None:
    """In counters, lists, metrics, logs and random numbers: the same cut, measured or given, comes to the same."""
    measured = Model(2.0)
    trainer = fit(measured, engine=engine)
    assert measured.calls == len(measured.seen) == len(measured.noise) == 2 * 3 * 4
    given = Model(2.0)
    other = fit(given, engine=engine, cut_before=trainer.connected_strategy.portable.strategy_state()["cut_before"])
    assert given.seen == measured.seen
    assert given.noise == measured.noise
    for name, value in given.state_dict().items():
        assert torch.equal(measured.state_dict()[name], value), name
    assert trainer.callback_metrics == other.callback_metrics


class Twice(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch).mean() + self.net(2 * batch).mean()


class Wrong(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.net(batch)
        self.seen.append(batch_idx)
        raise ValueError("on purpose")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [(Twice, StepError, "calls the network twice"), (Wrong, ValueError, "on purpose")],
)
def test_an_error_is_the_step_s_own(make: Callable[[], Model], error: type[Exception], message: str) -> None:
    """Not that of measuring, in which it comes up first."""
    module = make()
    with pytest.raises(error, match=message) as caught:
        fit(module)
    assert len(module.seen) == (make is Wrong)
    assert "pipeline_rest.py" not in {Path(line.path).name for line in caught.traceback}


@pytest.mark.parametrize(("speeds", "expected"), [(None, 4.0), ([3.0, 1.0], 4.0 / 3), ([1.0, 2.0], 8.0)])
def test_the_last_device_may_be_another(speeds: list[float] | None, expected: float) -> None:
    """Times that were measured there are longer on the first device by the factor by which it is slower."""
    rest = Block(name="", forward=4.0, backward=4.0)
    apart = [torch.device("cpu", 0), torch.device("cpu", 1)]
    found = _on_device_of_calls(rest, CutOptions(devices=apart, schedule="1f1b", micro_batches=2, speeds=speeds))
    assert (found.forward, found.backward) == pytest.approx((expected, expected))
    same = CutOptions(devices=[apart[1]] * 2, schedule="1f1b", micro_batches=2, speeds=speeds)
    assert _on_device_of_calls(rest, same) == rest
    there = CutOptions(devices=apart, schedule="1f1b", micro_batches=2, speeds=speeds, measured_on=apart[1])
    assert _on_device_of_calls(rest, there) == rest


def test_memory() -> None:
    """Memory of what a loss keeps, and of what lies beside the network, without the batch and the network's output."""
    module = Model()
    output = torch.randn(16, WIDTH, requires_grad=True)
    batch = torch.randn(16, 3)

    def step() -> StepResult:
        made: Tensor = rest.network_output()
        return StepResult((torch.exp(module.head(made)) * batch).mean(), 1, None)

    rest = LossProfile(module, step, batch, torch.device("cpu"), nullcontext)
    rest.measure(used_tensors(_traced(module)), output)
    assert rest.block is not None
    held = sum(tensor.nbytes for tensor in (*module.head.parameters(), *module.metric.buffers()))
    assert rest.block.parameters == held
    assert rest.block.trained == sum(parameter.nbytes for parameter in module.head.parameters())
    assert rest.block.saved == 16 * 3 * 4  # of the exponential
    assert rest.block.transient >= 16 * 3 * 4 + 16 * WIDTH * 4  # gradients of that and of the network's output


def _traced(module: Model) -> Any:
    return traced(module.net, torch.zeros(2, WIDTH))
