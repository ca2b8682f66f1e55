"""Training on sequences that are divided over processes: equal to one device, in float64."""

from functools import cache, partial
from typing import Any

import pytest

from tests.extensions.fsdp.context.networks import CASES, ONE_ROW, fit
from tests.extensions.fsdp.programs import assert_each_close, fsdp, in_processes


@cache
def on_one_device(case: str) -> dict[str, Any]:
    make, options = CASES[case]
    return fit(make, **options)


def run_all(rows: int, context: int, cases: list[str]) -> dict[str, dict[str, Any]]:
    outcomes = {}
    for case in cases:
        make, options = CASES[case]
        outcomes[case] = fit(make, fsdp(context=context), rows * context, rows=rows, **options)
    return outcomes


@pytest.mark.parametrize(
    ("rows", "context"),
    [
        pytest.param(1, 2, marks=pytest.mark.slow, id="context 2"),
        pytest.param(1, 4, marks=pytest.mark.slow, id="context 4"),
        pytest.param(2, 2, marks=pytest.mark.slow, id="data 2 x context 2"),
    ],
)
def test_training_equals_that_of_one_device(rows: int, context: int) -> None:
    cases = [case for case in CASES if rows == 1 or case not in ONE_ROW]
    outcomes = in_processes(rows * context, partial(run_all, rows, context, cases))
    assert_each_close(on_one_device, outcomes, tolerance=1e-10)
