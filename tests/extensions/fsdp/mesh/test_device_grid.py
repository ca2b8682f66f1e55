"""The grid of devices in the log and in the report of a run."""

from functools import partial
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from equipoise import MemoryLogger, RunReport, Trainer
from equipoise.extensions.fsdp import strategy
from equipoise.extensions.fsdp.mesh.grid import grid_rows
from tests.extensions.fsdp.context.networks import Gpt, Task, samples
from tests.extensions.fsdp.programs import QUIET, fsdp, in_processes


def test_cells_of_the_grid_follow_ranks() -> None:
    cells = [str(rank) for rank in range(8)]
    assert grid_rows(4, 2, cells) == [
        ["", "context 0, tensor 0", "context 0, tensor 1", "context 1, tensor 0", "context 1, tensor 1"],
        ["data 0", "0", "1", "2", "3"],
        ["data 1", "4", "5", "6", "7"],
    ]


def told(folder: Path) -> list[str]:
    """Write a report, and return what the strategy logs in the main process."""
    messages: list[str] = []
    options = {**QUIET, "default_root_dir": folder, "callbacks": [RunReport(), MemoryLogger(leaks=False)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "rank_zero_info", messages.append)
        trainer = Trainer(strategy=fsdp(context=2), devices=["cpu"] * 2, max_epochs=1, **options)
        trainer.fit(Task(Gpt()), DataLoader(samples(8), batch_size=4))  # type: ignore[arg-type]
    return messages


@pytest.mark.thorough
def test_the_log_and_the_report_show_the_grid(tmp_path: Path) -> None:
    logged, *_ = in_processes(2, partial(told, tmp_path))
    assert logged.splitlines()[1:] == ["        context 0  context 1", "data 0  rank 0     rank 1"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    _, _, grid = page.partition("<h2>Device mesh</h2>")
    grid, _, _ = grid.partition("</table>")
    assert '<td></td><th scope="col">context 0</th><th scope="col">context 1</th>' in grid
    assert '<th scope="row">data 0</th><td>rank 0 cpu: ' in grid
    assert "<td>rank 1 cpu: " in grid
