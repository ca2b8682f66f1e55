"""Two outcomes of a step agree within rounding, and a difference is named."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from equipoise.extensions.compiled.comparison.outcome import Outcome, Result, results_of
from equipoise.parallel.equality import TOLERANCES

TOLERANCE = TOLERANCES[torch.float64]
ONE = torch.ones((), dtype=torch.float64)
GRADIENT = torch.full((2, 2), 3.0, dtype=torch.float64)


def outcome(gradient: Tensor | None = GRADIENT, outputs: Any = ONE, buffer: Tensor = ONE, **logged: Any) -> Outcome:
    module = nn.Module()
    module.register_buffer("mean", buffer)
    results = [Result("the gradient of weight", gradient, is_gradient=True)]
    results += results_of(module, {"logits": outputs})
    results += [Result(f"the logged value {name!r}", value) for name, value in logged.items()]
    return Outcome(results)


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"gradient": GRADIENT * (1 + 1e-7)}, "the gradient of weight differs by 1.0e-07 of the largest element"),
        ({"gradient": None}, "the gradient of weight differs"),
        ({"buffer": ONE + 1e-7}, "the buffer mean differs by 1.0e-07 of the largest element"),
        ({"outputs": 2 * ONE}, "an output differs by 1.0e+00 of the largest element"),
        ({"outputs": [ONE, ONE]}, "it returns, logs or registers other values"),
        ({"number": 2.0}, "the logged value 'number' differs"),
        ({"count": 1.0}, "it returns, logs or registers other values"),
    ],
)
def test_the_first_difference_of_two_outcomes_is_named(changed: dict[str, Any], difference: str) -> None:
    assert outcome(number=1.0).first_difference(outcome(**{"number": 1.0, **changed}), TOLERANCE) == difference


@pytest.mark.parametrize("draw", [torch.rand, numpy.random.rand, lambda count: random.random()])
def test_other_random_numbers_are_a_difference(draw: Any) -> None:
    expected = outcome()
    assert expected.first_difference(outcome(), TOLERANCE) is None
    draw(1)
    assert expected.first_difference(outcome(), TOLERANCE) == "it draws random numbers otherwise"


def test_rounding_is_no_difference() -> None:
    """A gradient that is nothing but rounding is compared with the largest one."""
    small = Result("the gradient of bias", torch.full((4,), 1e-16, dtype=torch.float64), is_gradient=True)
    large = Result("the gradient of weight", GRADIENT, is_gradient=True)
    expected = Outcome([small, large, Result("the logged value 'number'", 1.0)])
    others = [small._replace(value=-3 * small.value), large._replace(value=GRADIENT * (1 + 1e-14))]
    logged = Result("the logged value 'number'", torch.tensor(1.0))
    assert expected.first_difference(Outcome([*others, logged]), TOLERANCE) is None


def test_values_that_are_not_finite_equal_themselves() -> None:
    gradient = GRADIENT.clone()
    gradient[0, 0] = torch.nan
    infinite = torch.tensor(torch.inf, dtype=torch.float64)
    expected = outcome(gradient, infinite)
    assert expected.first_difference(outcome(gradient.clone(), infinite), TOLERANCE) is None
    difference = expected.first_difference(outcome(GRADIENT, infinite), TOLERANCE)
    assert difference is not None
    assert difference.startswith("the gradient of weight differs")
