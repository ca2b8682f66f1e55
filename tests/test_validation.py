"""Whole numbers and numbers: True and False are neither, and messages name the argument and its value."""

import math
from typing import Any

import numpy
import pytest
import torch

from equipoise import ConfigurationError
from equipoise.validation import check_whole, is_number, is_whole

# A value; whether it is whole, and whether it is a number.
VALUES: list[tuple[Any, bool, bool]] = [
    (0, True, True),
    (2**80, True, True),
    (math.nan, False, True),
    (numpy.float64(1), False, True),
    (numpy.int64(1), False, False),
    (True, False, False),
    ("1", False, False),
    (None, False, False),
    (torch.tensor(1), False, False),
    (1j, False, False),
]


@pytest.mark.parametrize(("value", "whole", "number"), VALUES, ids=repr)
def test_true_and_false_are_no_numbers(value: Any, whole: bool, number: bool) -> None:
    assert is_whole(value) is whole
    assert is_number(value) is number
    assert not is_whole(value, least=2**81)
    assert is_whole(value, least=-3) is whole


def test_a_wrong_count_is_refused_with_its_name_and_value() -> None:
    check_whole("n", 1, least=1)
    check_whole("n", None, least=1, optional=True)
    for value in (0, True, 1.0, None):
        with pytest.raises(ConfigurationError, match=rf"^n must be an integer of at least 1, not {value!r}\.$"):
            check_whole("n", value, least=1)
    with pytest.raises(ConfigurationError, match=r"^n must be an integer of at least 1, or None, not 0\.$"):
        check_whole("n", 0, least=1, optional=True)
