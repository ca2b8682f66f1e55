"""Choose the devices of a run, from the arguments and the rank of this process."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator, MPSAccelerator

from equipoise.errors import ConfigurationError
from equipoise.parallel.communication.rank import Rank
from equipoise.trainer.settings.arguments import check_choice

__all__ = ["Devices", "accelerator_of", "select_devices", "select_num_nodes"]

_ACCELERATORS = ["auto", "cpu", "gpu", "cuda", "mps"]

Devices = int | str | Sequence[int | str | torch.device]


def select_devices(
    accelerator: Any, devices: Devices, place: Rank | None = None, num_nodes: int | None = None
) -> list[torch.device]:
    """The devices that the user asked for.

    Args:
        accelerator: "auto", "cpu", "gpu", "cuda" or "mps".
        devices: A count, "auto", -1 for all, indices as a list or as "0,2", or torch devices, repeats allowed.
            "auto": all GPUs of the machine, or the CPU once; where others have started this process, one device for
            each process of the machine.
        place: Where this process stands. Default: None, nobody has started it among others.
        num_nodes: The number of machines, if the user gave one. Default: None.

    Raises:
        ConfigurationError: If a device does not exist, or there are fewer than asked for.
    """
    named = _named_devices(devices)
    kind = _device_type(accelerator, named)
    if named is not None:
        if wrong := [device for device in named if device.type != kind]:
            raise ConfigurationError(
                f"accelerator={accelerator!r} does not fit devices={devices!r}: {wrong[0]} is no {kind} device. Give"
                " devices of one kind, and leave accelerator out or name that kind."
            )
        return [_existing(device) for device in named]
    available = _count(kind)
    if devices == "auto":
        if place is not None:
            return _devices_of_processes(kind, place.count_here(num_nodes))
        return [torch.device("cpu")] if kind == "cpu" else [torch.device(kind, index) for index in range(available)]
    indices = _indices(devices, kind, available)
    return [torch.device("cpu") if kind == "cpu" else torch.device(kind, index) for index in indices]


def select_num_nodes(num_nodes: int | None, devices: Sequence[torch.device], place: Rank | None) -> int:
    """Return the number of machines: the user's, or that which follows from where this process stands.

    Args:
        num_nodes: The user's; None if nothing was said.
        devices: The devices of this machine.
        place: Where this process stands. None: nobody has started it among others.
    """
    if num_nodes is not None:
        return num_nodes
    if place is None:
        return 1
    return place.count_machines(len(devices))


def _devices_of_processes(kind: str, count: int) -> list[torch.device]:
    """Return a device for each process that others have started on this machine, in the order of local ranks."""
    if kind == "cpu":
        return [torch.device("cpu")] * count
    own = _device_of_ray()
    if own is not None and own.type == kind:
        return [own] * count
    available = _count(kind)
    if available == 1:  # each process is shown its own, as Slurm's --gpus-per-task does
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
    ray = sys.modules.get("ray.train.torch")
    if ray is None:
        return None
    devices = ray.get_devices()
    return torch.device(devices[0]) if devices else None


def _named_devices(devices: Devices) -> list[torch.device] | None:
    """Torch devices, if they were given as such."""
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        return None
    if all(isinstance(device, int) for device in devices):
        return None
    try:
        return [torch.device(device) for device in devices]
    except (RuntimeError, TypeError):
        raise ConfigurationError(
            f"devices={devices!r}: a device is given as an index, a name such as 'cuda:0' or 'cpu', or a torch.device."
        ) from None


def _device_type(accelerator: Any, named: list[torch.device] | None) -> str:
    if isinstance(accelerator, Accelerator):
        accelerator = {"CPUAccelerator": "cpu", "CUDAAccelerator": "cuda", "MPSAccelerator": "mps"}.get(
            type(accelerator).__name__, accelerator
        )
    name = check_choice("accelerator", accelerator, _ACCELERATORS)
    if name == "auto" and named:
        return named[0].type
    if name in ("auto", "gpu"):
        found = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        if name == "gpu" and found == "cpu":
            raise ConfigurationError(
                "accelerator='gpu' was asked for, but torch finds no GPU. Take accelerator='auto' to use what there"
                " is, or 'cpu'."
            )
        return found
    if name != "cpu" and not _count(name):
        raise ConfigurationError(
            f"accelerator={name!r} was asked for, but torch finds no such device. Take accelerator='auto' to use"
            " what there is, or 'cpu'."
        )
    return name


def _count(kind: str) -> int:
    """How many devices of a kind there are; as many of the CPU as one likes."""
    if kind == "cuda":
        return torch.cuda.device_count()
    return int(torch.backends.mps.is_available()) if kind == "mps" else 1 << 16


def _existing(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return torch.device("cpu")
    index, available = device.index or 0, _count(device.type)
    if device.type not in ("cuda", "mps") or index >= available:
        raise ConfigurationError(f"The device {device} does not exist: torch finds {_inventory()}.")
    return torch.device(device.type, index)


def _inventory() -> str:
    cuda = torch.cuda.device_count()
    return f"{cuda} CUDA device{'s' * (cuda != 1)} and the CPU"


def _indices(devices: Devices, kind: str, available: int) -> list[int]:
    problem = (
        f"devices={devices!r} is neither a count, nor 'auto', nor -1 for all, nor indices such as [0, 2], nor devices"
        " such as ['cuda:0', 'cpu']."
    )
    if isinstance(devices, str):
        try:
            devices = [int(part) for part in devices.split(",") if part.strip()] if "," in devices else int(devices)
        except ValueError:
            raise ConfigurationError(problem) from None
    if isinstance(devices, bool) or not isinstance(devices, int | Sequence):
        raise ConfigurationError(problem)
    if isinstance(devices, int):
        count = (1 if kind == "cpu" else available) if devices == -1 else devices
        if count < 1:
            raise ConfigurationError(f"devices={devices!r} asks for no device. Give a count of at least 1.")
        if count > available:
            raise ConfigurationError(
                f"devices={devices!r} asks for more devices than there are: torch finds {_inventory()}."
            )
        return list(range(count))
    chosen = list(devices)
    if not chosen or not all(isinstance(index, int) and not isinstance(index, bool) for index in chosen):
        raise ConfigurationError(problem)
    if missing := [index for index in chosen if not 0 <= index < available]:  # type: ignore[operator]
        raise ConfigurationError(
            f"devices={devices!r}: there is no {kind} device {missing[0]}; torch finds {_inventory()}."
        )
    return [int(index) for index in chosen]  # type: ignore[arg-type]


def accelerator_of(device: torch.device) -> Accelerator:
    """Lightning's accelerator of a device, which callbacks ask for statistics."""
    return {"cuda": CUDAAccelerator, "mps": MPSAccelerator}.get(device.type, CPUAccelerator)()
