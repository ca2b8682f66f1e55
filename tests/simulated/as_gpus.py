"""A plugin of pytest: this process finds simulated CUDA devices, as on a machine with two GPUs.

Use it as `python -m pytest -p tests.simulated.as_gpus tests/gpu`. A Trainer computes where it is told to.
"""

from typing import Any

import pytest

from tests.simulated.devices import installation

installation.install()

__all__: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Let workers find the devices, too."""
    installation.install_in_workers()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tell how much each device has computed."""
    extension = installation.extension()
    for index in range(extension.device_count()):
        terminalreporter.write_line(f"cuda:{index} (simulated) has launched {extension.launches(index)} kernels")
