"""The grid of devices in the log and in the report of a run."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from equipoise import MemoryLogger, RunReport, Trainer
from equipoise.extensions.fsdp import strategy as strategy_module
from equipoise.extensions.fsdp.mesh.grid import grid_rows, make_mesh
from tests.extensions.fsdp.context.networks import Gpt, Task, samples
from tests.extensions.fsdp.programs import QUIET, fsdp, in_processes

CPU = torch.device("cpu")


def test_cells_of_the_grid_follow_ranks() -> None:
    cells = [str(rank) for rank in range(8)]
    assert grid_rows(4, 2, cells) == [
        ["", "context 0, tensor 0", "context 0, tensor 1", "context 1, tensor 0", "context 1, tensor 1"],
        ["data 0", "0", "1", "2", "3"],
        ["data 1", "4", "5", "6", "7"],
    ]


def said() -> list[str]:
    """Return what the strategy logs in the main process."""
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy_module, "rank_zero_info", messages.append)
        trainer = Trainer(strategy=fsdp(context=2), devices=["cpu"] * 2, max_steps=1, **QUIET)
        trainer.fit(Task(Gpt()), DataLoader(samples(4), batch_size=4))  # type: ignore[arg-type]
    return messages


@pytest.mark.thorough
def test_the_log_shows_the_grid_of_devices() -> None:
    assert in_processes(2, said)[0].splitlines()[1:] == ["        context 0  context 1", "data 0  rank 0     rank 1"]


def make_on_loopback(*sizes: Any) -> Any:
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    mesh = make_mesh(*sizes)
    groups: list[Any] = mesh.get_all_groups()
    # The timeout of the strategy.
    assert {group._get_backend(CPU).options._timeout for group in groups} == {timedelta(seconds=120)}
    return mesh


class Watching(Task):
    """Looks in the processes that the trainer has started how further groups are made."""

    def configure_model(self) -> None:
        strategy_module.make_mesh = make_on_loopback


@pytest.mark.thorough
def test_the_report_shows_the_grid_and_groups_have_interface_and_timeout_of_the_run(tmp_path: Path) -> None:
    options = {**QUIET, "default_root_dir": tmp_path, "callbacks": [RunReport(), MemoryLogger(leaks=False)]}
    trainer = Trainer(strategy=fsdp(context=2), devices=["cpu"] * 2, max_epochs=1, **options)
    trainer.fit(Watching(Gpt()), DataLoader(samples(8), batch_size=4))  # type: ignore[arg-type]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    _, _, grid = page.partition("<h2>Device mesh</h2>")
    grid, _, _ = grid.partition("</table>")
    assert '<td></td><th scope="col">context 0</th><th scope="col">context 1</th>' in grid
    assert '<th scope="row">data 0</th><td>rank 0 cpu: ' in grid
    assert "<td>rank 1 cpu: " in grid
