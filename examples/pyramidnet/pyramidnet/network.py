"""The network: three stages of residual units, each a few channels wider than the one before it.

The idea is that of "Deep Pyramidal Residual Networks" (Han, Kim, Kim, 2017), with its basic units.
"""

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["PyramidNet"]

_STAGES = 3
_FIRST_WIDTH = 16


class PyramidNet(nn.Module):
    """Classifies images of 32 by 32 pixels.

    The width grows by `alpha / (3 * (units + 1))` channels with every unit. The original divides by `3 * units`. With
    the divisor used here, 17 units and an alpha of 270 make the network that an article on several GPUs trained: each
    of 51 units adds 5 channels, and there are 24,253,410 parameters.

    Args:
        alpha: Channels by which the width would grow in `units + 1` units a stage. Default: 270.
        units: Residual units in each of the three stages. Default: 17.
        classes: Classes to tell apart. Default: 10.
    """

    def __init__(self, *, alpha: float = 270, units: int = 17, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(3, _FIRST_WIDTH), nn.BatchNorm2d(_FIRST_WIDTH))
        layers: list[nn.Module] = []
        width = _FIRST_WIDTH
        growth = alpha / (_STAGES * (units + 1))
        for index in range(_STAGES * units):
            next_width = round(_FIRST_WIDTH + growth * (index + 1))
            # The second and the third stage begin with half the height and half the breadth.
            stride = 2 if index in (units, 2 * units) else 1
            layers.append(Unit(width, next_width, stride))
            width = next_width
        self.units = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (batch, 3, 32, 32) to scores (batch, classes)."""
        return self.head(self.units(self.stem(images)))


class Unit(nn.Module):
    """A residual unit: two convolutions beside a shortcut without parameters.

    Args:
        width: Channels of the input.
        next_width: Channels of the output, at least as many.
        stride: 2 halves height and breadth.
    """

    def __init__(self, width: int, next_width: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, next_width - width
        self.layers = nn.Sequential(
            nn.BatchNorm2d(width),
            _convolution(width, next_width, stride),
            nn.BatchNorm2d(next_width),
            nn.ReLU(),
            _convolution(next_width, next_width),
            nn.BatchNorm2d(next_width),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Maps features (batch, width, height, breadth) to (batch, next_width, height / stride, breadth / stride)."""
        shortcut = features
        if self.stride > 1:
            shortcut = F.avg_pool2d(shortcut, self.stride, ceil_mode=True)
        # The channels that the input does not have yet are zeros in the shortcut.
        shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))
        return self.layers(features) + shortcut


def _convolution(width: int, next_width: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(width, next_width, 3, stride=stride, padding=1, bias=False)
