"""Stages and micro-batches without a trainer: values, gradients, order, threads, errors."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.extensions.pipeline.execution.suspended_step import SuspendedStep, current_step
from equipoise.extensions.pipeline.execution.threaded_engine import Pipeline
from equipoise.extensions.pipeline.graph.stages import StageProgram

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


class Steps:
    """A loss for each micro-batch."""

    def __init__(self, parts: Any) -> None:
        self.steps = [SuspendedStep(lambda part=part: self.step(part)) for part in parts]
        for step in self.steps:
            step.start()
        self.inputs = [[step.call[0][0]] for step in self.steps if step.call]

    @staticmethod
    def step(part: Tensor) -> Tensor:
        step = current_step()
        assert step is not None
        return step.suspend("", (part,), {}).square().sum()

    def backward(self, index: int) -> None:
        self.steps[index].result.backward()


def test_the_same_tensor_twice_gets_both_gradients():
    """A stage hands on one tensor under two names, and one that it only passes on."""
    weight = torch.tensor(3.0, requires_grad=True)

    def first(given: Any) -> Any:
        made = given[0] * weight
        return [(made, made), given[0]]

    def second(pair: Any, passed: Tensor) -> Any:
        return [pair[0] * 2 + pair[1] * 5, passed]

    stages = [
        StageProgram(first, ("pair", "passed")),
        StageProgram(second, ("sum", "passed")),
        StageProgram(lambda total, passed: total * passed, ()),
    ]
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    steps = Steps([x * 1])
    pipeline = Pipeline(stages, [CPU] * 3, "gpipe")
    pipeline.run(steps.steps, steps.inputs, steps.backward, [pipeline])
    made = (7 * x.detach() * weight.detach() * x.detach()).requires_grad_()
    assert torch.equal(weight.grad, (2 * made * 7 * x**2).sum().detach())
    torch.testing.assert_close(x.grad, 2 * made.detach() * 14 * weight.detach() * x.detach())


def test_threads_by_default_only_where_all_devices_differ():
    programs = [StageProgram(lambda given: given, ())] * 2
    assert not Pipeline(programs, [CPU, CPU], "1f1b").threads
    assert Pipeline(programs, [CPU, torch.device("cuda:0")], "1f1b").threads
    assert not Pipeline(programs[:1], [CPU], "1f1b").threads
    for devices, threads in (([CPU, torch.device("cuda:0")], True), ([CPU], False), ([CPU, CPU], False)):
        made = Pipeline(programs * len(devices), devices * 2, "looped_bfs", stages_per_device=2)
        assert made.threads is threads
