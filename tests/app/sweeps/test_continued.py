"""Sweeps that continue in the folder of each job, or are interrupted, and launchers in processes without our paths."""

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.plugins import Plugins

from tests.support.programs import EQUIPOISE, Program
from tests.support.projects import write

SWEEP = ("fit", "--multirun", "hydra.sweep.dir=sweep", "callbacks=[model_checkpoint]")


def first_checkpoint(project: Path, job: int) -> str:
    """Return what a job was told to continue from."""
    return str(yaml.safe_load((project / "sweep" / str(job) / "config.yaml").read_text())["ckpt_path"])


def epochs(project: Path, job: int) -> list[str]:
    """Return the epochs in the metrics of a job."""
    lines = (project / "sweep" / str(job) / "metrics.csv").read_text().splitlines()
    return sorted({row["epoch"] for row in csv.DictReader(lines)})


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*ckpt_path")
def test_each_job_continues_its_own_folder(project, equipoise):
    """A run elsewhere has other values, however new it is."""
    assert equipoise("fit", "callbacks=[model_checkpoint]")[0] == 0
    assert list(project.glob("outputs/**/*.ckpt"))
    assert equipoise(*SWEEP, "ckpt_path=last", "module.lr=0.1,0.2")[0] == 0
    assert [first_checkpoint(project, job) for job in (0, 1)] == ["last", "last"]
    code, _, err = equipoise(*SWEEP, "ckpt_path=last", "module.lr=0.1,0.2,0.3", "trainer.max_epochs=2")
    assert code == 0, err
    for job in (0, 1):
        assert Path(first_checkpoint(project, job)).is_relative_to(project / "sweep" / str(job))
    assert first_checkpoint(project, 2) == "last"
    assert [epochs(project, job) for job in range(3)] == [["0", "1"]] * 3


@pytest.mark.thorough
def test_an_evaluation_of_a_sweep_takes_the_newest_run(project, equipoise):
    assert equipoise("fit", "callbacks=[model_checkpoint]")[0] == 0
    (checkpoint,) = project.glob("outputs/**/*.ckpt")
    assert equipoise("test", *SWEEP[1:], "ckpt_path=best", "data.count=4,8", "objective=test_loss")[0] == 0
    assert {first_checkpoint(project, job) for job in (0, 1)} == {str(checkpoint)}


@pytest.mark.thorough
def test_a_launcher_without_our_paths(project, equipoise, tmp_path_factory, monkeypatch):
    instantiate = Plugins.instantiate_launcher

    def instantiate_elsewhere(self: Plugins, **options: Any) -> Any:
        launcher = instantiate(self, **options)
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not Path(entry, "tiny").exists()])
        return launcher

    monkeypatch.setattr(Plugins, "instantiate_launcher", instantiate_elsewhere)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    code, _, err = equipoise(*SWEEP, "--config-dir", str(project / "conf"), "module.lr=0.1,0.2")
    assert code == 0, err


class InTurn:
    """A launcher of the user's own, which runs jobs in this process until one is interrupted."""

    def check_sweep(self, config: Any) -> None:
        pass

    def run_jobs(self, jobs: Any, results: Any, display: Any) -> None:
        for job, result in zip(jobs, results, strict=True):
            result.begin()
            if job.number == 1:
                raise KeyboardInterrupt
            result.finish(job.run())


@pytest.mark.thorough
def test_an_interrupt_ends_the_jobs_that_had_no_end(project, equipoise):
    write(project, {"conf/launcher/in_turn.yaml": f"_target_: {__name__}.InTurn"})
    launcher = ("launcher=in_turn", "hydra/launcher=equipoise")
    code, out, err = equipoise(*SWEEP, *launcher, "module.lr=0.1,0.2,0.3")
    assert code == 130, err
    assert "Sweep: 1 done, 2 interrupted" in out


@pytest.mark.slow
def test_submitit(project, tmp_path_factory):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="hydra-submitit-launcher is not installed")
    folder = tmp_path_factory.mktemp("elsewhere")
    arguments = (*SWEEP, "--config-dir", str(project / "conf"), "hydra/launcher=submitit_local", "module.lr=0.1,0.2")
    with Program(EQUIPOISE, *arguments, folder=folder) as program:
        output, complaints = program.finish()
        assert program.returncode == 0, complaints
    assert "Sweep: 2 done" in output
    assert [epochs(folder, job) for job in (0, 1)] == [["0"], ["0"]]
