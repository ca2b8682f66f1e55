"""Gradients clipped by value, with and without any."""

import torch
from torch import nn

from equipoise.parallel.optimizers.clipping import clip_by_value


def test_each_entry_of_a_gradient_is_clipped() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([-2.0, 0.25, 3.0])
    clip_by_value(iter([parameter, nn.Parameter(torch.zeros(2))]), 0.5)
    assert parameter.grad.tolist() == [-0.5, 0.25, 0.5]


def test_without_gradients_there_is_nothing_to_clip() -> None:
    """Torch's own function raises an error there."""
    parameter = nn.Parameter(torch.zeros(3))
    clip_by_value([parameter], 0.5)
    assert parameter.grad is None
    clip_by_value([], 0.5)
