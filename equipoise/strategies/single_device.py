"""SingleDeviceStrategy: one process, one device; the default, and the smallest strategy."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.parallel.communication.rank import find_rank
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy

__all__ = ["SingleDeviceStrategy"]


class SingleDeviceStrategy(Strategy):
    """Train on one device.

    A module whose parameters are on several devices already (model parallelism by hand) stays where it is.

    Args:
        independent: Train one model in each process where torchrun, Slurm or Ray have started several, each without
            the others, as in a search over values. Folders and seeds are the program's business then. Default: False,
            where several processes are refused.

    Raises:
        ConfigurationError: If there are several devices, or several processes that are not independent.

    Example:
        >>> from equipoise import SingleDeviceStrategy, Trainer
        >>> trainer = Trainer(strategy=SingleDeviceStrategy(), devices=["cpu"], logger=False)
    """

    name: ClassVar[str] = "single_device"
    keeps_batches_whole: ClassVar[bool] = True

    def __init__(self, *, independent: bool = False) -> None:
        if not isinstance(independent, bool):
            raise ConfigurationError(f"independent must be True or False, not {independent!r}.")
        self.independent = independent

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Use one device; see `Strategy.connect`."""
        if self.independent:
            rank = find_rank()
            if rank is not None:
                # Each process of a machine uses another device.
                index = rank.local_rank % len(devices)
                devices = devices[index : index + 1]
                num_nodes = 1
            self._use_devices(devices, num_nodes)
        else:
            super().connect(devices, num_nodes)
        if len(devices) != 1:
            raise ConfigurationError(
                f"strategy='single_device' takes one device, but {len(devices)} were given:"
                f" {', '.join(map(str, devices))}."
                " Give one, such as devices=1, or choose a strategy for several."
            )

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Convert the module and move it to the device, unless the user has spread it over several."""
        devices_of_module = {parameter.device for parameter in module.parameters()}
        if len(devices_of_module) <= 1:
            super().setup(module, precision)
        else:
            precision.convert_module(module)
