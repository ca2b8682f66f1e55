"""The strategy: from a name, an object or "auto", connected to its devices."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.parallel.communication.rank import Rank, find_rank
from equipoise.strategies.single_device import SingleDeviceStrategy
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.settings.arguments import check_choice, check_count
from equipoise.trainer.settings.devices import Devices, select_devices, select_num_nodes

__all__ = ["connect_strategy"]


def connect_strategy(strategy: Any, accelerator: Any, devices: Devices, num_nodes: int | None) -> tuple[Strategy, int]:
    """Choose strategy, devices and number of machines, from the arguments and the rank of this process.

    Args:
        strategy: A name, an object, or "auto": `single_device` for one device, `ddp` for several or if a launcher has
            started several processes, with measured shares if devices are unequal. Where no process can be started,
            `dp` or `balanced` for several.
        accelerator: "auto", "cpu", "gpu", "cuda" or "mps".
        devices: See `select_devices`.
        num_nodes: The number of machines; None if the user gave none.

    Returns:
        The strategy, connected to its devices, and the number of machines.
    """
    check_count("num_nodes", num_nodes, least=1, optional=True)
    rank = find_rank()
    selected: Sequence[torch.device] = select_devices(accelerator, devices, rank, num_nodes)
    machines = select_num_nodes(num_nodes, selected, rank)
    connected: Strategy = strategy
    if not isinstance(strategy, Strategy):
        connected = _strategy_named(strategy, selected, rank)
    # Of all devices the strategy chooses its own, unless a launcher has decided on those of its processes.
    if devices == "auto" and rank is None:
        selected = connected.default_devices(selected)
    connected.connect(selected, machines)
    return connected, machines


def _strategy_named(name: Any, devices: Sequence[torch.device], rank: Rank | None) -> Strategy:
    if isinstance(name, str) and name.lower() == "auto":
        return _default_strategy(devices, rank)
    # Most programs leave the choice to the trainer.
    from equipoise.strategies.by_name import make_strategy, strategy_names
    from equipoise.trainer.settings.from_lightning.strategy_names import lightning_strategy, refuse_object

    if not isinstance(name, str):
        refuse_object(name)
    name = name.lower()
    # Names of Lightning's strategies mean one of these.
    names = strategy_names()
    if name not in names:
        counterpart = lightning_strategy(name)
        if counterpart is not None:
            name, options = counterpart
            return make_strategy(name, **options)
    if name in strategy_names(missing=True):
        return make_strategy(name)
    return make_strategy(check_choice("strategy", name, ["auto", *names]))


def _default_strategy(devices: Sequence[torch.device], rank: Rank | None) -> Strategy:
    knows_all_devices = True
    processes = 1
    if rank is not None:
        # A process knows the devices of its own machine only.
        processes = rank.world_size
        knows_all_devices = len(devices) == processes
    if len(devices) == 1 and processes == 1:
        return SingleDeviceStrategy()
    from equipoise.parallel.workers.availability import can_start_workers
    from equipoise.strategies.by_name import make_strategy

    are_unequal = knows_all_devices and _are_unequal(devices)
    if rank is None and not can_start_workers():
        name = "balanced" if are_unequal else "dp"
        rank_zero_info(f'strategy="auto" is {name}, since this system cannot start processes for ddp.')
        return make_strategy(name)
    if are_unequal:
        return make_strategy("ddp", shares="auto")
    return make_strategy("ddp")


def _are_unequal(devices: Sequence[torch.device]) -> bool:
    names = (torch.cuda.get_device_name(device) if device.type == "cuda" else device.type for device in devices)
    return len(set(names)) > 1
