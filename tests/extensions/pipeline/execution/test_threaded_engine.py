"""Stages and micro-batches without a trainer: values, gradients, order, threads, errors."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.execution.suspended_step import SuspendedStep, current_step
from equipoise.extensions.pipeline.execution.threaded_engine import Pipeline
from equipoise.extensions.pipeline.graph.stages import StageProgram, make_stages
from equipoise.extensions.pipeline.schedule.schedule import SCHEDULES, actions_of
from tests.support.traces import traced

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]).double()


def pipeline_of(net: nn.Module, x: Tensor, stages: int, **options: Any) -> Pipeline:
    made = traced(net, x)
    count = len(made.calls)
    ends = [count * (index + 1) // stages for index in range(stages)]
    return Pipeline(make_stages(made, ends), [CPU] * stages, options.pop("schedule", "1f1b"), **options)


PLANS = [("gpipe", 1, 1), ("1f1b", 1, 1), ("gpipe", 2, 1), ("1f1b", 2, 1), ("gpipe", 3, 1), ("1f1b", 3, 1)]
PLANS += [(schedule, devices, 2) for schedule in SCHEDULES[2:] for devices in (1, 2)]
PLANS += [("interleaved_zero_bubble", 3, 1), ("interleaved_zero_bubble", 1, 1), ("interleaved_zero_bubble", 2, 3)]
PLANS += [("looped_bfs", 1, 4), ("interleaved_1f1b", 1, 3), ("interleaved_1f1b", 2, 3), ("looped_bfs", 2, 3)]


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


@pytest.mark.quick_cases(13)
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(("schedule", "devices", "each"), PLANS)
def test_gradients_also_of_what_was_computed_before(schedule, devices, each, threads):
    net, x = network(), torch.rand(7, 4).double()
    before = torch.rand(4, 4).double().requires_grad_()
    net(x @ before).square().sum().backward()
    expected = [before.grad, *(parameter.grad for parameter in net.parameters())]
    before.grad = None
    net.zero_grad()
    pipeline = pipeline_of(net, x, devices * each, schedule=schedule, threads=threads, stages_per_device=each)
    steps = Steps([part @ before for part in x.split(2)])
    pipeline.run(steps.steps, steps.inputs, steps.backward, [pipeline] * len(steps.steps))
    for gradient, tensor in zip(expected, [before, *net.parameters()], strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-12, atol=1e-12)
    for device in range(devices):
        own = [(span.stage, span.action) for span in pipeline.timeline.spans if span.stage % devices == device]
        assert own == actions_of(schedule, device, devices, 4, each)
    assert (pipeline.timeline.stages, pipeline.timeline.devices) == (devices * each, devices)
    assert all(span.end >= span.begin for span in pipeline.timeline.spans)


def test_one_forward_through_all_stages():
    net, x = network(), torch.rand(3, 4).double().requires_grad_()
    pipeline = pipeline_of(net, x, 3)
    assert torch.equal(pipeline.forward([x]), net(x))
    (gradient,) = torch.autograd.grad(pipeline.forward([x]).sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(net(x).sum(), x)[0])


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
