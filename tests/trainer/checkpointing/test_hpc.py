"""`ckpt_path="hpc"`: the newest checkpoint that an interrupted job has left, by Equipoise or by Lightning."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from tests.support.trainer_runs import Small, loader, refuses, trainer


def write(folder: Path, *names: str, cls: Any = None) -> None:
    """Write checkpoints whose steps are their position, each newer than the one before."""
    for position, name in enumerate(names, start=1):
        run = trainer(**({} if cls is None else {"cls": cls}), max_steps=position, max_epochs=-1)
        run.fit(Small(), loader(8))
        run.save_checkpoint(folder / name)
        os.utime(folder / name, (position, position))


def chosen(folder: Path, **options: Any) -> str:
    """Return the name of the checkpoint from which a fit continues."""
    run = trainer(default_root_dir=folder, max_steps=10, max_epochs=-1, **options)
    run.fit(Small(), loader(8), ckpt_path="hpc")
    return Path(run.ckpt_path).name


def test_the_newest_of_both(tmp_path: Path) -> None:
    """Numbers of Lightning's files count, not their times; those of other programs do not count."""
    write(tmp_path, "hpc_ckpt_10.ckpt", "hpc_ckpt_9.ckpt", cls=L.Trainer)
    assert chosen(tmp_path) == "hpc_ckpt_10.ckpt"
    write(tmp_path, "slurm-7.ckpt", "slurm-8.ckpt", "slurm-8-fit-2.ckpt", "slurm-jobs.ckpt", "my_hpc_ckpt_11.ckpt")
    assert chosen(tmp_path) == "slurm-8.ckpt"
    os.utime(tmp_path / "hpc_ckpt_10.ckpt", (90, 90))
    assert chosen(tmp_path) == "hpc_ckpt_10.ckpt"


def test_a_fit_goes_on_where_lightnings_job_was_interrupted(tmp_path: Path) -> None:
    write(tmp_path, "a.ckpt", "b.ckpt", "hpc_ckpt_1.ckpt", cls=L.Trainer)
    run = trainer(default_root_dir=tmp_path, max_steps=5, max_epochs=-1)
    module = Small()
    run.fit(module, loader(8), ckpt_path="hpc")
    assert (run.global_step, len(module.ran)) == (5, 2)


def test_evaluations_take_that_of_any_fit(tmp_path: Path) -> None:
    write(tmp_path, "slurm-8.ckpt", "slurm-8-fit-2.ckpt")
    run = trainer(default_root_dir=tmp_path)
    run.test(Small(), loader(), ckpt_path="hpc", verbose=False)
    assert Path(run.ckpt_path).name == "slurm-8-fit-2.ckpt"


def test_tasks_of_an_array_are_other_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "slurm-5_1.ckpt", "slurm-5_2.ckpt", "slurm-5.ckpt")
    assert chosen(tmp_path) == "slurm-5.ckpt"
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert chosen(tmp_path) == "slurm-5_1.ckpt"


@pytest.mark.parametrize("folder", [".", "missing"])
def test_none_is_an_error(tmp_path: Path, folder: str) -> None:
    run = trainer(default_root_dir=tmp_path / folder)
    refuses(lambda: run.fit(Small(), loader(), ckpt_path="hpc"), "fit(ckpt_path='hpc')", "hpc_ckpt_N.ckpt", folder)
