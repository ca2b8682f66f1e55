"""Choose the devices of a run, from the arguments and the rank of this process."""

import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator, MPSAccelerator

from equipoise.errors import ConfigurationError, ConfigurationTypeError
from equipoise.parallel.communication.rank import Rank
from equipoise.trainer.settings.arguments import check_choice
from equipoise.validation import is_whole

__all__ = ["Devices", "accelerator_of", "select_devices", "select_num_nodes"]

_ACCELERATORS = ["auto", "cpu", "gpu", "cuda", "mps"]
_LIGHTNING_ACCELERATORS = {
    "CPUAccelerator": "cpu",
    "CUDAAccelerator": "cuda",
    "MPSAccelerator": "mps",
}
_NOT_SUPPORTED = {"tpu": "TPUs", "xla": "TPUs", "xpu": "Intel's GPUs", "npu": "NPUs", "hpu": "Gaudi", "ipu": "IPUs"}

Devices = int | str | Sequence[int | str | torch.device]


def select_devices(
    accelerator: Any, devices: Devices, rank: Rank | None = None, num_nodes: int | None = None
) -> list[torch.device]:
    """Return the devices that the arguments mean.

    Args:
        accelerator: "auto", "cpu", "gpu", "cuda" or "mps".
        devices: A count, "auto", -1 for all, indices as a list or as "0,2", or torch devices, repeats allowed.
            "auto": all GPUs of the machine, or the CPU once; if a launcher has started this process, one device for
            each process of the machine.
        rank: The rank that a launcher such as torchrun has given this process. Default: None, no launcher.
        num_nodes: The number of machines, if the user gave one. Default: None.

    Raises:
        ConfigurationError: If a device does not exist, or the user asks for more devices than are available.
    """
    # 1. Devices by their names.
    named_devices = _named_devices(devices)
    kind = _device_type(accelerator, named_devices)
    if named_devices is not None:
        for device in named_devices:
            if device.type != kind:
                raise ConfigurationError(
                    f"accelerator={accelerator!r} does not fit devices={devices!r}: {device} is no {kind} device. Give"
                    " devices of one kind, and leave accelerator out or name that kind."
                )
        _refuse_repeated_mps(kind, devices, len(named_devices))
        return [_existing(device) for device in named_devices]

    # 2. The choice of Equipoise.
    available = _count(kind)
    if devices == "auto":
        if rank is not None:
            return _devices_of_processes(kind, rank.count_here(num_nodes))
        if kind == "cpu":
            return [torch.device("cpu")]
        return [torch.device(kind, index) for index in range(available)]

    # 3. A count or indices; the CPU has no indices.
    indices = _indices(devices, kind, available)
    _refuse_repeated_mps(kind, devices, len(indices))
    if kind == "cpu":
        return [torch.device("cpu")] * len(indices)
    return [torch.device(kind, index) for index in indices]


def select_num_nodes(num_nodes: int | None, devices: Sequence[torch.device], rank: Rank | None) -> int:
    """Return the number of machines: the user's, or that which follows from the rank of this process.

    Args:
        num_nodes: The user's number; None if the user gave none.
        devices: The devices of this machine.
        rank: The rank that a launcher has given this process; None: no launcher.
    """
    if num_nodes is not None:
        return num_nodes
    if rank is None:
        return 1
    return rank.count_machines(len(devices))


def _devices_of_processes(kind: str, count: int) -> list[torch.device]:
    """Return a device for each process that a launcher has started on this machine, in the order of local ranks."""
    if kind == "cpu":
        return [torch.device("cpu")] * count
    ray_device = _device_of_ray()
    if ray_device is not None and ray_device.type == kind:
        return [ray_device] * count
    available = _count(kind)
    if kind == "mps" and count > 1:
        raise ConfigurationError(
            f"There are {count} processes on this machine, but torch finds {_inventory()}, which they cannot share."
            " Start one, or give accelerator='cpu'."
        )
    # Each process sees a GPU of its own, for example under Slurm's --gpus-per-task.
    if available == 1:
        return [torch.device(kind, 0)] * count
    if count > available:
        raise ConfigurationError(
            f"There are {count} processes on this machine, but torch finds {_inventory()}, and each needs one of its"
            " own. Start fewer, or give accelerator='cpu', or name devices, repeats allowed. If these are processes of"
            " several machines, give num_nodes."
        )
    return [torch.device(kind, index) for index in range(count)]


def _device_of_ray() -> torch.device | None:
    """Return the device that Ray has given this worker: its ranks are not in the order of the GPUs."""
    # Ray has imported this module in each of its workers.
    ray = sys.modules.get("ray.train.torch")
    if ray is None:
        return None
    devices = ray.get_devices()
    if not devices:
        return None
    return torch.device(devices[0])


def _named_devices(devices: Devices) -> list[torch.device] | None:
    """Return the devices, if the user names them; None for a count, indices or a text."""
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        return None
    if not devices:
        return None
    # Indices.
    if all(isinstance(device, int) for device in devices):
        return None
    try:
        return [torch.device(device) for device in devices]
    except (RuntimeError, TypeError):
        raise ConfigurationTypeError(
            f"devices={devices!r}: a device is given as an index, a name such as 'cuda:0' or 'cpu', or a torch.device."
        ) from None


def _device_type(accelerator: Any, named_devices: list[torch.device] | None) -> str:
    """Return "cpu", "cuda" or "mps"."""
    # An accelerator of the user stays as it is, and is refused below.
    if isinstance(accelerator, Accelerator):
        accelerator = _LIGHTNING_ACCELERATORS.get(type(accelerator).__name__, accelerator)
    unsupported = _NOT_SUPPORTED.get(str(accelerator).lower())
    if unsupported is not None:
        options = ", ".join(map(repr, _ACCELERATORS))
        raise ConfigurationError(
            f"accelerator={accelerator!r}: {unsupported} are not supported. Take one of {options}; 'auto' takes the"
            " GPUs if there are any, else the CPU."
        )
    if re.fullmatch(r"(cpu|cuda|mps):\d+", str(accelerator)):
        raise ConfigurationError(f"accelerator={accelerator!r} names one device: give devices=[{str(accelerator)!r}].")
    name = check_choice("accelerator", accelerator, _ACCELERATORS)
    if name == "auto" and named_devices:
        return named_devices[0].type
    if name in ("auto", "gpu"):
        kind = _available_type()
        if name == "gpu" and kind == "cpu":
            raise ConfigurationError(
                "accelerator='gpu' was asked for, but torch finds no GPU. Take accelerator='auto' to use the"
                " devices that are present, or 'cpu'."
            )
        return kind
    if name != "cpu" and not _count(name):
        raise ConfigurationError(
            f"accelerator={name!r} was asked for, but torch finds no such device. Take accelerator='auto' to use"
            " the devices that are present, or 'cpu'."
        )
    return name


def _available_type() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    return "cpu"


def _count(kind: str) -> int:
    """Return the number of devices of a kind; a large number for the CPU, which may be used repeatedly."""
    if kind == "cuda":
        return torch.cuda.device_count()
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return 1 << 16


def _existing(device: torch.device) -> torch.device:
    kind = device.type
    if kind == "cpu":
        return torch.device("cpu")
    index = device.index or 0
    available = _count(kind)
    if kind not in ("cuda", "mps") or index >= available:
        raise ConfigurationError(f"The device {device} does not exist: torch finds {_inventory()}.")
    return torch.device(kind, index)


def _refuse_repeated_mps(kind: str, devices: Devices, count: int) -> None:
    if kind == "mps" and count > 1:
        raise ConfigurationError(
            f"devices={devices!r}: there is one MPS device, which computes one thing at a time, so it is named once."
            " Give devices=1; several replicas can be tried with devices=['cpu', 'cpu']."
        )


def _inventory() -> str:
    if torch.backends.mps.is_available():
        return "1 MPS device and the CPU"
    count = torch.cuda.device_count()
    if count == 1:
        return "1 CUDA device and the CPU"
    return f"{count} CUDA devices and the CPU"


def _indices(devices: Devices, kind: str, available: int) -> list[int]:
    problem = (
        f"devices={devices!r} is neither a count, nor 'auto', nor -1 for all, nor indices such as [0, 2], nor devices"
        " such as ['cuda:0', 'cpu']."
    )

    # 1. A text, as on a command line.
    argument = devices
    if isinstance(devices, str):
        try:
            argument = [int(part) for part in filter(str.strip, devices.split(","))] if "," in devices else int(devices)
        except ValueError:
            raise ConfigurationError(problem) from None

    # 2. A count.
    if is_whole(argument):
        return list(range(_checked_count(argument, kind, available)))

    # 3. A list of indices.
    if not isinstance(argument, Sequence) or not argument:
        raise ConfigurationError(problem)
    indices: list[int] = []
    for index in argument:
        if not is_whole(index):
            raise ConfigurationError(problem)
        indices.append(int(index))
    for index in indices:
        if not 0 <= index < available:
            raise ConfigurationError(
                f"devices={argument!r}: there is no {kind} device {index}; torch finds {_inventory()}."
            )
    return indices


def _checked_count(count: int, kind: str, available: int) -> int:
    # -1 means all of them. The CPU can be used repeatedly, so all of it is one.
    number = count
    if count == -1:
        number = available
        if kind == "cpu":
            number = 1
    if number < 1:
        raise ConfigurationError(f"devices={count!r} asks for no device. Give a count of at least 1.")
    if number > available:
        raise ConfigurationError(f"devices={count!r} asks for more devices than there are: torch finds {_inventory()}.")
    return number


def accelerator_of(device: torch.device) -> Accelerator:
    """Return Lightning's accelerator for a device, from which callbacks read statistics."""
    if device.type == "cuda":
        return CUDAAccelerator()
    if device.type == "mps":
        return MPSAccelerator()
    return CPUAccelerator()
