"""The processes of a mesh as a grid, for the log and for the report of a run."""

from typing import Any

from equipoise.extensions.report.page.record import ReportSection
from equipoise.extensions.report.read_trainer import peaks_of
from equipoise.formats import format_bytes

__all__ = ["grid_rows", "section"]


def grid_rows(together: int, context: int, cells: list[str]) -> list[list[str]]:
    """Return the rows of a grid: a head, and one for each batch of a step.

    Args:
        together: The number of processes that compute a batch together.
        context: The number of parts of its sequences.
        cells: What stands at the place of each process, by rank.

    Example:
        >>> grid_rows(2, 1, ["a", "b", "c", "d"])
        [['', 'tensor 0', 'tensor 1'], ['data 0', 'a', 'b'], ['data 1', 'c', 'd']]
    """
    tensor = together // context
    heads = []
    for place in range(together):
        # Those that have parts of a layer are successive.
        numbers = []
        if context > 1:
            numbers.append(f"context {place // tensor}")
        if tensor > 1:
            numbers.append(f"tensor {place % tensor}")
        heads.append(", ".join(numbers))
    rows = [["", *heads]]
    for start in range(0, len(cells), together):
        rows.append([f"data {start // together}", *cells[start : start + together]])
    return rows


def section(trainer: Any, module: Any) -> ReportSection | None:
    """Return a section with the grid of devices and the peak memory of each; None without a mesh."""
    strategy = trainer.strategy
    if strategy.name != "fsdp":
        return None
    processes = strategy.processes
    if processes.processes_per_batch == 1:
        return None
    # 1. What each process has: the main process as a device, the others after their rank.
    peaks = peaks_of(trainer)
    device = strategy.root_device
    cells = []
    for rank in range(processes.world_size):
        name = f"rank {rank} {device.type}"
        nbytes = peaks.get(name if rank else str(device))
        cells.append(name if nbytes is None else f"{name}: {format_bytes(nbytes)}")

    # 2. The grid.
    text = "Each row computes a batch. Peaks are those that MemoryLogger has read, on CPUs of the whole process."
    rows = grid_rows(processes.processes_per_batch, strategy.context, cells)
    return ReportSection("Device mesh", text, rows, row_heads=True)
