"""Memory that runs out in the process of a stage: named, and done again with more micro-batches, exactly."""

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import OOMRecovery, PipelineStrategy, Trainer, WorkerError
from tests.support.pairs import pairwise
from tests.support.pipelines import stay_whole
from tests.support.quiet import QUIET

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*memory", r"ignore:Batch \d+ of \d+ samples"),
    pytest.mark.usefixtures("quick_collections"),
]

WIDTH, STAGES = 4, 3


class Labelled(PipelineStrategy):
    """Tells its devices apart, though all are the CPU."""

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        super().connect([torch.device("cpu", index) for index in range(len(devices))], num_nodes)


class RunsOut(torch.autograd.Function):
    """Runs out of memory backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("injected backward")


class Layer(nn.Module):
    """Runs out of memory with more than two samples; in a backward, a forward, or an evaluation."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.linear, self.place = nn.Linear(WIDTH, WIDTH), place

    def forward(self, value: Tensor) -> Tensor:
        stay_whole(value)
        large, place = len(value) > 2, self.place
        if large and place == ("forward" if self.training else "evaluation"):
            raise torch.OutOfMemoryError("injected forward")
        made = torch.tanh(self.linear(value))
        return RunsOut.apply(made) if large and self.training and place == "backward" else made


class Model(L.LightningModule):
    def __init__(self, stage: int = -1, place: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(*(Layer(place if index == stage else "") for index in range(STAGES)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def fit(
    module: Model, engine: str, *, micro_batches: int = 2, sizes: Sequence[int] = (2, 8, 8, 2)
) -> tuple[Model, OOMRecovery, float]:
    recovery = OOMRecovery()
    trainer = Trainer(
        strategy=Labelled(engine=engine, micro_batches=micro_batches, cut_before=["net.1", "net.2"], timeout=300.0),  # type: ignore[arg-type]
        devices=["cpu"] * STAGES,
        precision="64-true",
        max_epochs=2,
        num_sanity_val_steps=0,
        callbacks=[recovery],
        **QUIET,
    )
    draw = torch.Generator().manual_seed(5)
    # The first batch has enough memory: what is followed of the forward is compared with it on the last device.
    batches = [torch.randn(size, WIDTH, generator=draw, dtype=torch.float64) for size in sizes]
    trainer.fit(module, *(DataLoader(batches, batch_size=None) for _ in range(2)))  # type: ignore[arg-type]
    return module, recovery, float(trainer.callback_metrics["val"])


def same(one: nn.Module, other: nn.Module) -> None:
    for (name, expected), actual in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=name)


@cache
def undisturbed() -> tuple[Model, OOMRecovery, float]:
    """The run that has enough memory, made once."""
    return fit(Model(), "threads", micro_batches=4)


PLACES = ["forward", "backward", "evaluation"]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("stage", "place", "engine"), pairwise(range(STAGES), PLACES, ["threads", "processes"]))
def test_the_device_is_named_and_the_batch_cut(stage: int, place: str, engine: str) -> None:
    whole, _, val = undisturbed()
    module, recovery, other_val = fit(Model(stage, place), engine)
    same(whole, module)
    assert other_val == pytest.approx(val, rel=1e-12)
    assert recovery.events
    assert {event.device for event in recovery.events} == {f"cpu:{stage}"}
    assert {event.phase == "evaluation" for event in recovery.events} == {place == "evaluation"}


def test_memory_runs_out_while_the_forward_is_compared() -> None:
    """The comparison computes on the last device. A smaller micro-batch is compared instead."""
    whole, _, val = fit(Model(), "threads", micro_batches=4, sizes=(8, 8, 2))
    module, recovery, other_val = fit(Model(0, "forward"), "threads", sizes=(8, 8, 2))
    same(whole, module)
    assert other_val == pytest.approx(val, rel=1e-12)
    assert recovery.events[0].device == f"cpu:{STAGES - 1}"


class Rate(float):
    """A learning rate for which a step has no memory, but in the process that has made it."""

    def __init__(self, value: float) -> None:
        self.process = os.getpid()

    def __neg__(self) -> float:
        if os.getpid() != self.process:
            raise torch.OutOfMemoryError("injected in the step")
        return -float(self)


class Stepping(Model):
    def on_train_batch_start(self, *args: Any) -> None:
        self.optimizers().param_groups[0]["lr"] = Rate(0.5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def test_a_step_of_another_process_s_optimizer_is_not_lost() -> None:
    """It is noticed when the next batch is computed, which could be done again, but without what that step had done."""
    with pytest.raises(WorkerError, match=r"'optimize' failed after .* injected in the step"):
        fit(Stepping(), "processes")
