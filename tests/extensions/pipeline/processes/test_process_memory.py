"""Memory that runs out in the process of a stage: named, and done again with more micro-batches, exactly."""

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import OOMRecovery, PipelineStrategy, WorkerError
from tests.support.networks.layers import WIDTH, Task, layers
from tests.support.one_device import Run
from tests.support.pairs import pairwise
from tests.support.pipelines import assert_same, fit, pipelined, stay_whole

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*memory", r"ignore:Batch \d+ of \d+ samples"),
    pytest.mark.usefixtures("quick_collections"),
]

STAGES = 3


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
    """Sums what it receives. With more than two samples a forward, a backward or an evaluation runs out of memory."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.linear, self.place = nn.Linear(WIDTH, WIDTH), place
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        stay_whole(value)
        if self.training:
            self.total += value.detach().sum(0)
        large, place = len(value) > 2, self.place
        if large and place == ("forward" if self.training else "evaluation"):
            raise torch.OutOfMemoryError("injected forward")
        made = torch.tanh(self.linear(value))
        return RunsOut.apply(made) if large and self.training and place == "backward" else made


def run(
    stage: int = -1, place: str = "", *, engine: str = "threads", micro_batches: int = 2, sizes: Any = (2, 8, 8, 2)
) -> tuple[Run, OOMRecovery]:
    """Train a module of which one stage runs out of memory, if any."""

    def make() -> Task:
        return layers(*(Layer(place if index == stage else "") for index in range(STAGES)))

    recovery = OOMRecovery()
    cut = {"cut_before": ["net.2", "net.3"], "timeout": 300.0}
    plan = pipelined(STAGES, Labelled, engine=engine, micro_batches=micro_batches, **cut)
    # The first batch has enough memory: what is followed of the forward is compared with it on the last device.
    options = {"val": sizes, "num_sanity_val_steps": 0, "callbacks": [recovery]}
    return fit(make, sizes, **plan, **options), recovery


@cache
def undisturbed() -> Run:
    """The run that has enough memory, made once."""
    return run(micro_batches=4)[0]


PLACES = ["forward", "backward", "evaluation"]


@pytest.mark.quick_cases(3)
@pytest.mark.thorough
@pytest.mark.parametrize(("stage", "place", "engine"), pairwise(range(STAGES), PLACES, ["threads", "processes"]))
def test_the_device_without_memory_is_named_and_the_batch_cut(stage: int, place: str, engine: str) -> None:
    actual, recovery = run(stage, place, engine=engine)
    assert_same(undisturbed()._replace(gradients=[]), actual)
    assert recovery.events
    assert {event.device for event in recovery.events} == {f"cpu:{stage}"}
    assert {event.phase == "evaluation" for event in recovery.events} == {place == "evaluation"}


@pytest.mark.thorough
def test_memory_runs_out_while_the_forward_is_compared() -> None:
    """The comparison computes on the last device. A smaller micro-batch is compared instead."""
    whole, _ = run(micro_batches=4, sizes=(8, 8, 2))
    actual, recovery = run(0, "forward", sizes=(8, 8, 2))
    assert_same(whole._replace(gradients=[]), actual)
    assert recovery.events[0].device == f"cpu:{STAGES - 1}"


class Rate(float):
    """A learning rate for which a step has no memory, but in the process that has made it."""

    def __init__(self, value: float) -> None:
        self.process = os.getpid()

    def __neg__(self) -> float:
        if os.getpid() != self.process:
            raise torch.OutOfMemoryError("injected in the step")
        return -float(self)


class Stepping(Task):
    def on_train_batch_start(self, *args: Any) -> None:
        self.optimizers().param_groups[0]["lr"] = Rate(0.5)


def test_a_step_of_another_process_s_optimizer_is_not_lost() -> None:
    """It is noticed when the next batch is computed, which could be done again, but without what that step had done."""

    def make() -> Any:
        module = Stepping(nn.Sequential(nn.Flatten(), *(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES))))
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
        return module

    plan = pipelined(STAGES, engine="processes", cut_before=["net.2", "net.3"], timeout=300.0)
    with pytest.raises(WorkerError, match=r"'optimize' failed after .* injected in the step"):
        fit(make, (8, 8, 8), callbacks=[OOMRecovery()], **plan)
