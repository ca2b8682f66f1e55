"""Gradients clipped by value where there are none."""

import torch
from torch import nn

from equipoise.parallel.optimizers.clipping import clip_by_value


def test_without_gradients_there_is_nothing_to_clip() -> None:
    """Torch's own function raises an error there."""
    parameter = nn.Parameter(torch.zeros(3))
    clip_by_value([parameter], 0.5)
    assert parameter.grad is None
    clip_by_value([], 0.5)
