"""The comparison finds what differs, whatever kind it is, and says where."""

import math
from typing import Any

import pytest
import torch

from tests.support.equality import assert_equal, differences

NAN = float("nan")


@pytest.mark.parametrize(
    ("expected", "actual", "line"),
    [
        (
            torch.zeros(2, 2),
            torch.tensor([[0.0, 0.0], [1.0, 2.0]]),
            "w: 2 of 4 values differ, first [2]: 0.0 became 1.0",
        ),
        (torch.tensor(1.0), torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)), "w: 1 of 1 values differ"),
        (torch.tensor(0.0), torch.tensor(-0.0), "0.0 became -0.0"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "w.dtype: torch.float32 became torch.float64"),
        (torch.zeros(2), torch.zeros(3), "w.shape"),
        (torch.zeros(2), torch.zeros(2, requires_grad=True), "w.requires_grad"),
        ({"a": 1}, {"a": 2}, "w['a']: int 1 became int 2"),
        ({"a": 1}, {}, "w['a']: missing, expected int 1"),
        ({}, {"a": 1}, "w['a']: not expected, here int 1"),
        ([1, 2], [1, 2, 3], "w: 2 entries became 3"),
        ((1,), [1], "w: tuple (1,) became list [1]"),
        (1, 1.0, "w: int 1 became float 1.0"),
        (True, 1, "w: bool True became int 1"),
        (0.1, math.nextafter(0.1, 1.0), "w: 0.1 became 0.1"),
        (NAN, 1.0, "w: nan became 1.0"),
        ("x", None, "w: 'x' became None"),
        (["a", "b", "c"], ["a", "c", "b"], "w[1]: of 3 and 3 lines"),
        (["a"], ["a", "b"], "- (the end)"),
    ],
)
def test_differing_values_are_named(expected: Any, actual: Any, line: str) -> None:
    found = list(differences(expected, actual, "w"))
    assert len(found) == 1
    assert line in found[0]


def test_ignored_places_do_not_count() -> None:
    expected, actual = {"time": 1.0, "value": 1.0}, {"time": 2.0, "value": 1.0}
    assert_equal(expected, actual, ignore=["time"])
    with pytest.raises(AssertionError, match=r"Runs differ in 1 places\n  time: 1.0 became 2.0"):
        assert_equal(expected, actual, title="Runs", ignore=["value"])


@pytest.mark.parametrize("apart", [1e-13, 1e-11])
def test_a_tolerance_is_relative_to_the_largest_element_and_absolute(apart: float) -> None:
    expected = {"weights": [torch.tensor([1.0, 100.0], dtype=torch.float64)], "loss": 0.5, "step": 3}
    large = {**expected, "weights": [expected["weights"][0] + torch.tensor([100 * apart, 0.0])]}
    small = {**expected, "loss": 0.5 + apart}
    for actual, place in ((large, r"weights\[0\]\[0\]"), (small, r"loss\[\]")):
        if apart < 1e-12:
            assert_equal(expected, actual, 1e-12)
        else:
            with pytest.raises(AssertionError, match=rf"{place}: [^\n]* of the largest element"):
                assert_equal(expected, actual, 1e-12)


def test_modules_are_compared_by_their_states() -> None:
    one, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    with pytest.raises(AssertionError, match="weight"):
        assert_equal(one, other, 1e-6)
    other.load_state_dict(one.state_dict())
    assert_equal(one, other)
