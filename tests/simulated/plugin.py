"""A plugin of pytest: all tests of this process run on simulated CUDA devices.

Use it as `python -m pytest -p tests.simulated.plugin FILE ...`. Each device "cpu" that a Trainer receives becomes
cuda:0, cuda:1, cuda:0 and so on, in turn.
"""

from typing import Any

import pytest

from tests.simulated import installation

installation.install()

__all__ = ["ON_ONE_DEVICE_ONLY"]

_PIPELINE = "tests/strategies/pipeline"

# Tests whose own assumptions do not hold on several devices, each with the reason. They are deselected. A name without
# parameters stands for all cases of a test.
ON_ONE_DEVICE_ONLY: dict[str, str] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Let every Trainer of this process use the simulated devices."""
    import torch

    from equipoise.trainer.settings import defaults

    select = defaults.select_devices

    def select_simulated(*args: Any, **kwargs: Any) -> list[torch.device]:
        devices = select(*args, **kwargs)
        count = torch.cuda.device_count()
        simulated = []
        for index, device in enumerate(devices):
            simulated.append(torch.device("cuda", index % count) if device.type == "cpu" else device)
        return simulated

    defaults.select_devices = select_simulated


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the table."""
    kept, left_out = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        listed = test in ON_ONE_DEVICE_ONLY or item.nodeid in ON_ONE_DEVICE_ONLY
        (left_out if listed else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
