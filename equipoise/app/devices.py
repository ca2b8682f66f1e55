"""`equipoise devices`: a table of the devices, printed once or watched."""

import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from equipoise.errors import ConfigurationError
from equipoise.memory.devices import DeviceInfo, format_bytes, list_devices

__all__ = ["show_devices"]

_BAR = 12  # characters
_SHORTEST = 0.1  # seconds


def show_devices(arguments: Sequence[str]) -> None:
    """Runs the command.

    Args:
        arguments: Nothing, or `--watch` with or without seconds between readings, as `--watch=0.5` or `--watch 0.5`.

    Raises:
        ConfigurationError: If the arguments are others.
    """
    seconds = _interval(arguments)
    if seconds is None:
        from rich.console import Console

        Console().print(_table(list_devices()))
        return
    _watch(seconds)


def _interval(arguments: Sequence[str]) -> float | None:
    """The seconds between readings; None: read once."""
    if not arguments:
        return None
    flag, equals, value = arguments[0].partition("=")
    given = [value] if equals else list(arguments[1:])
    if flag != "--watch" or len(given) > 1 or (equals and len(arguments) > 1):
        raise ConfigurationError(
            f"equipoise devices takes no arguments but --watch; it was given {' '.join(arguments)}."
        )
    try:
        seconds = float(given[0]) if given else 1.0
    except ValueError:
        seconds = 0.0
    if not _SHORTEST <= seconds < threading.TIMEOUT_MAX:
        raise ConfigurationError(f"--watch takes seconds from {_SHORTEST} on, such as --watch=2, not {given[0]}.")
    return seconds


def _watch(seconds: float) -> None:
    """Reads again and again, until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    class Quiet(Console):
        def on_broken_pipe(self) -> None:  # whoever read has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(0)

    console, never = Quiet(), threading.Event()
    least: dict[str, int] = {}

    def read() -> Any:
        devices = list_devices()
        for info in devices:
            if info.memory_free is not None:
                least[info.device] = min(info.memory_free, least.get(info.device, info.memory_free))
        return _watched(devices, least)

    try:
        if not (console.is_terminal and sys.stdout.isatty()):  # a file or a pipe gets one table after the other
            while True:
                console.print(read())
                sys.stdout.flush()
                never.wait(seconds)
        with Live(read(), console=console, auto_refresh=False) as live:
            while True:
                never.wait(seconds)
                live.update(read(), refresh=True)
    except KeyboardInterrupt:  # how one ends watching
        return


def _table(devices: Sequence[DeviceInfo]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = " is not set: every device is visible" if visible is None else f"={visible}: no other devices are visible"
    table = Table(box=SIMPLE, caption=f"index: as in trainer.devices=[0]. CUDA_VISIBLE_DEVICES{shown}.")
    for column in ("device", "index", "physical", "name"):
        table.add_column(column, overflow="fold", no_wrap=column != "name")
    for column in ("memory", "free", "compute\ncapability", "cores"):
        table.add_column(column, justify="right", no_wrap=True)
    for info in devices:
        capability = ".".join(map(str, info.compute_capability)) if info.compute_capability else None
        memory = (_size(info.memory_total), _size(info.memory_free))
        cells = (info.device, info.index, info.physical, info.name, *memory, capability, info.cores)
        table.add_row(*("-" if cell is None else str(cell) for cell in cells))
    return table


def _watched(devices: Sequence[DeviceInfo], least: dict[str, int]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, caption="used: by all processes; least free: since watching began. Ctrl-C ends.")
    table.add_column("device", no_wrap=True, min_width=6)
    table.add_column("name", overflow="ellipsis", no_wrap=True, max_width=28)
    for column in ("memory", "used", "least free"):
        table.add_column(column, justify="right", no_wrap=True, min_width=10)
    table.add_column("", no_wrap=True, min_width=_BAR + 5)
    for info in devices:
        used = None if info.memory_free is None else info.memory_total - info.memory_free
        share = 0.0 if used is None else used / max(1, info.memory_total)
        full = round(share * _BAR)
        colour = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
        sizes = map(_size, (info.memory_total, used, least.get(info.device)))
        bar = f"[{colour}]{'█' * full}[/][dim]{'░' * (_BAR - full)}[/] {share:4.0%}"
        table.add_row(info.device, info.name, *sizes, bar)
    return table


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)
