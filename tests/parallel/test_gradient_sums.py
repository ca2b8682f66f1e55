"""Sums of gradients of which some are missing."""

import torch

from equipoise.parallel.gradient_sums import sum_gradients

CPU = torch.device("cpu")


def test_missing_gradients_are_left_out() -> None:
    first = torch.tensor([1.0, 2.0], dtype=torch.float64)
    second = torch.tensor([3.0, 5.0], dtype=torch.float64)
    total = sum_gradients([None, first, None, second], CPU)
    assert total is not None
    assert total.tolist() == [4.0, 7.0]
    # The summands stay as they are.
    assert first.tolist() == [1.0, 2.0]


def test_no_gradient_has_no_sum() -> None:
    assert sum_gradients([None, None], CPU) is None


def test_the_sum_has_a_graph() -> None:
    summand = torch.ones(2, dtype=torch.float64, requires_grad=True)
    total = sum_gradients([summand * 2, summand * 3], CPU)
    assert total is not None
    total.sum().backward()
    assert summand.grad is not None
    assert summand.grad.tolist() == [5.0, 5.0]
