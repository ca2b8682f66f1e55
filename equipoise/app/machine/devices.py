"""`equipoise devices`: a table of the devices, printed once or watched."""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equipoise.errors import ConfigurationError
from equipoise.formats import format_bytes
from equipoise.memory.devices import DeviceInfo, list_devices

__all__ = ["show_devices"]

# Width of a bar, in characters.
_BAR = 12

# Shortest time between two readings, in seconds.
_SHORTEST = 0.1


def show_devices(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Run the command.

    Args:
        arguments: None, or `--watch`, optionally with seconds between readings, as `--watch=0.5` or `--watch 0.5`.
        folders: None.

    Raises:
        ConfigurationError: If there are other arguments.
    """
    seconds = _interval(arguments)
    if seconds is not None:
        _watch(seconds)
        return
    from equipoise.tables.whole_table import print_table
    from equipoise.tables.width import output_width, wrapped

    print_table(_table(list_devices()), repeated=2, leaves_out=True)
    print(wrapped(_visibility(), output_width()))


def _interval(arguments: Sequence[str]) -> float | None:
    """Return the seconds between readings; None: read once."""
    if not arguments:
        return None

    # 1. The text after `--watch=` or `--watch `.
    flag, equals, value = arguments[0].partition("=")
    values = list(arguments[1:])
    if equals:
        values.insert(0, value)
    if flag != "--watch" or len(values) > 1:
        raise ConfigurationError(
            f"equipoise devices takes no arguments but --watch; it was given {' '.join(arguments)}."
        )
    if not values:
        return 1.0

    # 2. The number.
    try:
        seconds = float(values[0])
    except ValueError:
        # A text is as wrong as zero seconds.
        seconds = 0.0
    if not _SHORTEST <= seconds < threading.TIMEOUT_MAX:
        raise ConfigurationError(f"--watch takes seconds from {_SHORTEST} on, such as --watch=2, not {values[0]}.")
    return seconds


def _watch(seconds: float) -> None:
    """Read the devices repeatedly, until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    class Raising(Console):
        def on_broken_pipe(self) -> None:
            # The command ends as any other whose reader, such as `head`, has ended.
            raise BrokenPipeError

    console = Raising()
    clock = threading.Event()
    least_free: dict[str, int] = {}

    def read() -> Any:
        devices = list_devices()
        _update_least_free(least_free, devices)
        return _live_table(devices, least_free)

    try:
        is_interactive = console.is_terminal and sys.stdout.isatty()
        # A file or a pipe receives one table after another.
        while not is_interactive:
            console.print(read())
            sys.stdout.flush()
            clock.wait(seconds)
        with Live(read(), console=console, auto_refresh=False) as live:
            while True:
                clock.wait(seconds)
                live.update(read(), refresh=True)
    except KeyboardInterrupt:
        # The way to end watching.
        return


def _update_least_free(least_free: dict[str, int], devices: Sequence[DeviceInfo]) -> None:
    for info in devices:
        if info.memory_free is None:
            continue
        previous = least_free.get(info.device, info.memory_free)
        least_free[info.device] = min(info.memory_free, previous)


def _table(devices: Sequence[DeviceInfo]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE)
    for column in ("device", "index", "physical", "name"):
        table.add_column(column, no_wrap=True)
    for column in ("memory", "free", "compute\ncapability", "cores"):
        table.add_column(column, justify="right", no_wrap=True)
    for info in devices:
        table.add_row(*_cells(info))
    return table


def _visibility() -> str:
    """Return the line below the table: what an index means, and which devices are visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    visibility = " is not set: every device is visible"
    if visible is not None:
        visibility = f"={visible}: no other devices are visible"
    return f"index: as in trainer.devices=[0]. CUDA_VISIBLE_DEVICES{visibility}."


def _cells(info: DeviceInfo) -> list[str]:
    capability = None
    if info.compute_capability:
        capability = ".".join(map(str, info.compute_capability))
    values = (
        info.device,
        info.index,
        info.physical,
        info.name,
        _size(info.memory_total),
        _size(info.memory_free),
        capability,
        info.cores,
    )
    cells = []
    for value in values:
        if value is None:
            cells.append("-")
        else:
            cells.append(str(value))
    return cells


def _live_table(devices: Sequence[DeviceInfo], least_free: dict[str, int]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, caption="used: by all processes; least free: since watching began. Ctrl-C ends.")
    table.add_column("device", no_wrap=True, min_width=6)
    # It alone may be wrapped: in a narrow window the other columns stay whole.
    table.add_column("name", overflow="fold", max_width=28)
    for column in ("memory", "used", "least free"):
        table.add_column(column, justify="right", no_wrap=True, min_width=10)
    table.add_column("", no_wrap=True, min_width=_BAR + 5)
    for info in devices:
        used = None
        share = 0.0
        if info.memory_free is not None:
            used = info.memory_total - info.memory_free
            share = used / max(1, info.memory_total)
        table.add_row(
            info.device,
            info.name,
            _size(info.memory_total),
            _size(used),
            _size(least_free.get(info.device)),
            _bar(share),
        )
    return table


def _bar(share: float) -> str:
    """Return a bar of coloured characters for a share from 0 to 1."""
    colour = "green"
    if share > 0.95:
        colour = "red"
    elif share > 0.8:
        colour = "yellow"
    full = round(share * _BAR)
    full_part = "█" * full
    empty_part = "░" * (_BAR - full)
    return f"[{colour}]{full_part}[/][dim]{empty_part}[/] {share:4.0%}"


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    return format_bytes(nbytes)
