"""Two states of a step agree within rounding, and a difference is named."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from equipoise.extensions.compiled.comparison.agreement import TOLERANCES
from equipoise.extensions.compiled.step_state import StepState

TOLERANCE = TOLERANCES[torch.float64]


class Step:
    """A module after a step, and what the step has returned."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
        self.loss = torch.tensor(2.0, dtype=torch.float64)
        self.outputs: Any = {"loss": self.loss, "logits": torch.ones(2, dtype=torch.float64)}
        self.logged: list[tuple[str, Any]] = [("loss", self.loss), ("number", 1.0)]
        for parameter in self.module.parameters():
            parameter.grad = torch.full_like(parameter, 3.0)

    def state(self) -> StepState:
        return StepState(self.module, self.loss, self.outputs, self.logged)


def other_loss(step: Step) -> None:
    step.loss = step.loss + 1e-7


def other_gradient(step: Step) -> None:
    step.module[0].weight.grad[0, 0] += 1e-7


def no_gradient(step: Step) -> None:
    step.module[0].bias.grad = None


def other_buffer(step: Step) -> None:
    step.module[1].running_var += 1e-7


def other_output(step: Step) -> None:
    step.outputs["logits"] = step.outputs["logits"] * 2


def further_output(step: Step) -> None:
    step.outputs["more"] = 1


def other_value(step: Step) -> None:
    step.logged[1] = ("number", 2.0)


def other_name(step: Step) -> None:
    step.logged[1] = ("count", 1.0)


def draw_of_torch(step: Step) -> None:
    torch.rand(1)


def draw_of_numpy(step: Step) -> None:
    numpy.random.rand()


def draw_of_python(step: Step) -> None:
    random.random()


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (other_loss, "the loss is 2.0000001 and not 2"),
        (other_gradient, "the gradient of 0.weight differs"),
        (no_gradient, "the gradient of 0.bias differs"),
        (other_buffer, "the buffer 1.running_var differs"),
        (other_output, "the outputs are others"),
        (further_output, "the outputs are others"),
        (other_value, "the logged value 'number' differs"),
        (other_name, "other values are logged"),
        (draw_of_torch, "it draws random numbers otherwise"),
        (draw_of_numpy, "it draws random numbers otherwise"),
        (draw_of_python, "it draws random numbers otherwise"),
    ],
)
def test_differences(change: Callable[[Step], None], difference: str) -> None:
    expected = Step().state()
    step = Step()
    assert expected.first_difference(step.state(), TOLERANCE) is None
    change(step)
    assert expected.first_difference(step.state(), TOLERANCE) == difference


def test_rounding_is_no_difference() -> None:
    expected = Step()
    step = Step()
    # A gradient that is nothing but rounding, beside others of size 3.
    expected.module[0].bias.grad = torch.full((4,), 1e-16, dtype=torch.float64)
    step.module[0].bias.grad = torch.full((4,), -3e-16, dtype=torch.float64)
    step.module[0].weight.grad *= 1 + 1e-14
    step.logged[1] = ("number", torch.tensor(1.0))
    assert expected.state().first_difference(step.state(), TOLERANCE) is None


def test_values_that_are_not_finite() -> None:
    expected = Step()
    step = Step()
    for each in (expected, step):
        each.module[0].weight.grad[0, 0] = torch.nan
        each.loss = torch.tensor(torch.inf, dtype=torch.float64)
    assert expected.state().first_difference(step.state(), TOLERANCE) is None
    step.module[0].weight.grad[0, 0] = 1.0
    assert expected.state().first_difference(step.state(), TOLERANCE) == "the gradient of 0.weight differs"
