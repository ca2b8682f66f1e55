"""One process, one device: the default, and the smallest strategy."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy

__all__ = ["SingleDeviceStrategy"]


class SingleDeviceStrategy(Strategy):
    """Trains on one device.

    A module whose parameters already lie on several devices (model parallelism written by hand) is left where it is.

    Example:
        >>> from equipoise import SingleDeviceStrategy, Trainer
        >>> trainer = Trainer(strategy=SingleDeviceStrategy(), devices=["cpu"], logger=False)
    """

    name: ClassVar[str] = "single_device"

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Takes one device; see `Strategy.connect`."""
        super().connect(devices, num_nodes)
        if len(devices) != 1:
            raise ConfigurationError(
                f"strategy='single_device' takes one device, but {len(devices)} were given:"
                f" {', '.join(map(str, devices))}."
                " Give one, such as devices=1, or choose a strategy for several."
            )

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Converts the module and moves it to the device, unless it is spread over several by hand."""
        if len({parameter.device for parameter in module.parameters()}) <= 1:
            super().setup(module, precision)
        else:
            precision.convert_module(module)
