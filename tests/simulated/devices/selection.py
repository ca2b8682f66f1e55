"""The devices of a Trainer while devices are simulated: CUDA devices in place of CPUs, unless a test needs those."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from equipoise.trainer.settings import strategy

__all__ = ["on_the_host", "replace_selection"]

_hosts: list[bool] = []


def replace_selection() -> None:
    """Let each device "cpu" of a Trainer become cuda:0, cuda:1, cuda:0 and so on, in turn, in this process."""
    select = strategy.select_devices

    def select_simulated(*args: Any, **kwargs: Any) -> list[torch.device]:
        devices = select(*args, **kwargs)
        if _hosts:
            return devices
        count = torch.cuda.device_count()
        for index, device in enumerate(devices):
            if device.type == "cpu":
                devices[index] = torch.device("cuda", index % count)
        return devices

    strategy.select_devices = select_simulated


@contextmanager
def on_the_host() -> Iterator[None]:
    """Let Trainers that are constructed in a `with` block have the CPU where they ask for it."""
    _hosts.append(True)
    try:
        yield
    finally:
        _hosts.pop()
