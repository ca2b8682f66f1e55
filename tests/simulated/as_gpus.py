"""A plugin of pytest: this process finds simulated CUDA devices, as on a machine with two GPUs.

Use it as `python -m pytest -p tests.simulated.as_gpus tests/gpu`. A Trainer computes where it is told to.
"""

from collections.abc import Generator
from typing import Any

import pytest

from tests.simulated.devices import installation

installation.install()

__all__: list[str] = []

_launches_of_files: dict[str, list[int]] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Let workers find the devices, too."""
    installation.install_in_workers()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Count the launches of each file of tests."""
    file = item.nodeid.partition("::")[0]
    before = _launches()
    result = yield
    of_file = _launches_of_files.setdefault(file, [0] * len(before))
    for index, count in enumerate(_launches()):
        of_file[index] += count - before[index]
    return result


def _launches() -> list[int]:
    """Return the number of kernels that each device has launched."""
    extension = installation.extension()
    return [extension.launches(index) for index in range(extension.device_count())]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Report how much each device has computed in the tests of each file."""
    for file, counts in _launches_of_files.items():
        of_devices = ", ".join(f"cuda:{index} {count}" for index, count in enumerate(counts))
        terminalreporter.write_line(f"launches of simulated devices in {file}: {of_devices}")
