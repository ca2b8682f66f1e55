"""Differences of two values, and what rounding may cause."""

import math
from typing import Any

import pytest
import torch

from equipoise.parallel.equality import EXACT, TOLERANCES, Tolerance, gap_of, tolerance_of

ROUNDED = TOLERANCES[torch.float64]
NAN, INF = math.nan, math.inf


def tensor(*values: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("expected", "computed"),
    [
        (tensor(1.0, 4.0), tensor(1.0, 4.0 + 1e-12)),
        (tensor(0.0, 1e-15), tensor(1e-15, 0.0)),
        (tensor(NAN, INF, -INF), tensor(NAN, INF, -INF)),
        (tensor(2.0), tensor(2.0, dtype=torch.float32)),
        (torch.tensor(2.0), 2.0),
        (2.0, torch.tensor(2.0)),
        (tensor(1 + 2j, dtype=torch.complex128), tensor(1 + 2j, dtype=torch.complex128)),
        (tensor(0, 3, dtype=torch.int64).to_sparse(), tensor(0, 3, dtype=torch.int64).to_sparse()),
        (torch.empty(0, 2), torch.empty(0, 2)),
        (object(), object()),
    ],
)
def test_values_that_are_equal_within_a_tolerance(expected: Any, computed: Any) -> None:
    assert not gap_of(expected, computed, ROUNDED)


@pytest.mark.parametrize(
    ("expected", "computed", "share", "place"),
    [
        (tensor(1.0, 4.0), tensor(1.0, 3.0), 0.25, (1,)),
        (tensor([0.0, 0.0]), tensor([0.0, 2.0]), 2.0, (0, 1)),
        (tensor(NAN, 1.0), tensor(1.0, 1.0), INF, (0,)),
        (tensor(1.0, 2.0), tensor(1.0), INF, ()),
        (tensor(1, dtype=torch.int64), tensor(2, dtype=torch.int64), INF, ()),
        (None, tensor(1.0), INF, ()),
        (1, 1.0, INF, ()),
    ],
)
def test_the_gap_of_values_that_differ_has_a_place(
    expected: Any, computed: Any, share: float, place: tuple[int, ...]
) -> None:
    gap = gap_of(expected, computed, ROUNDED)
    assert gap
    assert (gap.share, gap.place) == (share, place)


def test_exact_values_are_equal_to_the_bit() -> None:
    one, other = tensor(1.0, 4.0), tensor(1.0, 4.0 + 1e-15)
    assert not gap_of(one, other, ROUNDED)
    assert gap_of(one, other, EXACT)


def test_the_tolerance_of_dtypes_and_of_gradients() -> None:
    """The coarsest dtype counts, and a gradient that is nothing but rounding is compared with the largest one."""
    assert tolerance_of([torch.float64, torch.bfloat16]) == TOLERANCES[torch.bfloat16]
    assert tolerance_of([]) == tolerance_of([torch.complex64]) == TOLERANCES[torch.float32]
    assert tolerance_of([torch.complex128]) == TOLERANCES[torch.float64]
    small, large = tensor(1e-15), tensor(100.0)
    assert gap_of(small, 3 * small, Tolerance(1e-9, 0.0))
    assert not gap_of(small, 3 * small, ROUNDED.of_gradients([small, None, large]))
