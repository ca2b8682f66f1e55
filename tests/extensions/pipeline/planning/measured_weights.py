"""Networks that multiply by a parameter or a buffer, and what the measured memory of their calls must be."""

import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.planning.profile import profile_calls
from equipoise.extensions.pipeline.planning.stage_costs import Block
from tests.support.traces import traced

__all__ = ["Assertive", "Mixing", "check_weights"]

WIDTH = 64
SAMPLES = 4
# Bytes of a matrix, and of what a layer receives and returns.
WEIGHT = WIDTH * WIDTH * 4
VALUE = SAMPLES * WIDTH * 4


class Mixing(nn.Module):
    """Multiplies by a parameter or by a buffer: its backward needs either."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        weight = torch.rand(WIDTH, WIDTH)
        if is_trained:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight)

    def forward(self, values: Tensor) -> Tensor:
        return values @ self.weight


class Assertive(Mixing):
    """Stays whole, since it cannot be followed."""

    def forward(self, values: Tensor) -> Tensor:
        if values.sum() > 0:
            return super().forward(values)
        return values


def profile(kind: type[Mixing], is_trained: bool, device: torch.device) -> list[Block]:
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), kind(is_trained))
    values = torch.rand(SAMPLES, WIDTH)
    return profile_calls(traced(network, values), network, [values], device)


def check_weights(kind: type[Mixing], is_trained: bool, device: torch.device) -> None:
    """Check that parameters and buffers count once, and not with what each micro-batch keeps."""
    blocks = profile(kind, is_trained, device)
    bytes_of_linear = WEIGHT + WIDTH * 4
    assert sum(block.parameters for block in blocks) == bytes_of_linear + WEIGHT
    assert sum(block.trained for block in blocks) == bytes_of_linear + is_trained * WEIGHT
    assert max(block.saved for block in blocks) == VALUE
