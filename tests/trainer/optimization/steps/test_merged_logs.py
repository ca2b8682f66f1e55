"""Numbers that parts of a batch log are those of one device."""

import math
from typing import Any

import pytest

from tests.support.trainer_runs import loader, trainer, with_step

NUMBERS = {"small": 1.5, "whole": 3, "truth": True, "large": 1e39, "larger": 2**70, "infinite": math.inf}


def log_numbers(module: Any, batch: Any) -> Any:
    for name, number in NUMBERS.items():
        module.log(name, number, on_step=True, on_epoch=True)
    return module.loss(batch)


def logged(strategy: str, devices: int, precision: Any) -> dict[str, float]:
    run = trainer(strategy=strategy, devices=["cpu"] * devices, precision=precision)
    run.fit(with_step(log_numbers), loader(2, 4))
    return {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_logged_numbers_of_any_size_are_those_of_one_device(precision: str) -> None:
    """Also those that the dtype of the logged values cannot hold."""
    expected = logged("single_device", 1, precision)
    assert expected["large_step"] == (math.inf if precision == "32-true" else 1e39)
    assert logged("dp", 2, precision) == expected
