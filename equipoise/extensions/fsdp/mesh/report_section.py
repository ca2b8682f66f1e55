"""The section of the report that shows the devices of a mesh as a grid."""

from typing import Any

from equipoise.extensions.fsdp.mesh.grid import grid_rows
from equipoise.extensions.report.page.record import ReportSection
from equipoise.extensions.report.read_trainer import peaks_of
from equipoise.formats import format_bytes

__all__ = ["section"]


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
