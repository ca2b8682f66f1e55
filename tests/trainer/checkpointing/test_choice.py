"""Checkpoints that are chosen by a word: "hpc", the newest that an interrupted job has left, and "last" under Ray."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
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


def test_hpc_is_the_newest_file_of_either_trainer(tmp_path: Path) -> None:
    """Numbers of Lightning's files count, not their times; those of other programs do not count."""
    write(tmp_path, "hpc_ckpt_10.ckpt", "hpc_ckpt_9.ckpt", cls=L.Trainer)
    assert chosen(tmp_path) == "hpc_ckpt_10.ckpt"
    write(tmp_path, "slurm-7.ckpt", "slurm-8.ckpt", "slurm-8-fit-2.ckpt", "slurm-jobs.ckpt", "my_hpc_ckpt_11.ckpt")
    assert chosen(tmp_path) == "slurm-8.ckpt"
    os.utime(tmp_path / "hpc_ckpt_10.ckpt", (90, 90))
    assert chosen(tmp_path) == "hpc_ckpt_10.ckpt"


def test_hpc_goes_on_where_lightnings_job_was_interrupted(tmp_path: Path) -> None:
    write(tmp_path, "a.ckpt", "b.ckpt", "hpc_ckpt_1.ckpt", cls=L.Trainer)
    run = trainer(default_root_dir=tmp_path, max_steps=5, max_epochs=-1)
    module = Small()
    run.fit(module, loader(8), ckpt_path="hpc")
    assert (run.global_step, len(module.ran)) == (5, 2)


def test_hpc_in_an_evaluation_is_the_newest_of_any_fit(tmp_path: Path) -> None:
    write(tmp_path, "slurm-8.ckpt", "slurm-8-fit-2.ckpt")
    run = trainer(default_root_dir=tmp_path)
    run.test(Small(), loader(), ckpt_path="hpc", verbose=False)
    assert Path(run.ckpt_path).name == "slurm-8-fit-2.ckpt"


def test_hpc_of_a_task_of_an_array_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "slurm-5_1.ckpt", "slurm-5_2.ckpt", "slurm-5.ckpt")
    assert chosen(tmp_path) == "slurm-5.ckpt"
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert chosen(tmp_path) == "slurm-5_1.ckpt"


@pytest.mark.parametrize("folder", [".", "missing"])
def test_hpc_without_a_file_is_refused(tmp_path: Path, folder: str) -> None:
    run = trainer(default_root_dir=tmp_path / folder)
    refuses(lambda: run.fit(Small(), loader(), ckpt_path="hpc"), "fit(ckpt_path='hpc')", "hpc_ckpt_N.ckpt", folder)


# Ray has started the workers anew


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The only worker of a run of Ray Train."""
    context = SimpleNamespace(get_world_size=lambda: 1)
    module = SimpleNamespace(get_context=lambda: context, get_checkpoint=lambda: None)
    monkeypatch.setitem(sys.modules, "ray.train", module)
    return module


def test_last_under_ray_is_the_checkpoint_that_was_reported(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1. The first attempt has no checkpoint yet, which is no reason for a warning.
    first = trainer(enable_checkpointing=True, default_root_dir=tmp_path)
    first.fit(Small(), loader(), ckpt_path="last")
    first.save_checkpoint(tmp_path / "reported" / "checkpoint.ckpt")

    # 2. The second resumes from the report.
    monkeypatch.setattr(worker, "get_checkpoint", lambda: SimpleNamespace(path=str(tmp_path / "reported")))
    second = trainer(max_epochs=2, enable_checkpointing=True, default_root_dir=tmp_path)
    second.fit(Small(), loader(), ckpt_path="last")
    assert second.ckpt_path == str(tmp_path / "reported" / "checkpoint.ckpt")
    assert (second.current_epoch, second.global_step) == (2, 6)
