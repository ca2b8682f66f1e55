"""The memory of devices, read in a process of its own.

Reading the free memory of a GPU takes several hundred MiB there for the context of the process that reads. In a process
that soon ends, it is free again before the training begins.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from equipoise.errors import ConfigurationError
from equipoise.extensions.planning.description.devices import PlannedDevice, describe_devices
from equipoise.parallel.workers.bounded_call import call_bounded

__all__ = ["describe_devices_elsewhere"]

# Time to import torch, and to create a context on each device.
_SECONDS = 60.0


def describe_devices_elsewhere(names: Sequence[str]) -> list[PlannedDevice]:
    """Return devices of this machine as a plan describes them, without a context on them in this process.

    Args:
        names: Names of the devices, such as "cuda:1".

    Raises:
        ConfigurationError: If they cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="equipoise-plan-") as folder:
        result_file = Path(folder, "devices.json")
        reason = call_bounded(
            _write_devices,
            result_file,
            list(names),
            timeout=_SECONDS,
            output=Path(folder, "output.txt"),
        )
        # The file is written at the end.
        if not result_file.is_file():
            raise ConfigurationError(f"the memory of {', '.join(names)} cannot be read: {reason}")
        values = json.loads(result_file.read_text(encoding="utf-8"))
    return [PlannedDevice(**device) for device in values]


def _write_devices(result_file: Path, names: Sequence[str]) -> None:
    """Write the devices as JSON."""
    devices = [asdict(device) for device in describe_devices(list(names))]
    result_file.write_text(json.dumps(devices), encoding="utf-8")
