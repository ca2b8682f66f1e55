"""`equipoise fit` and its siblings: what they run, and what they leave behind."""

import csv
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule

from equipoise import NoGradEvaluation, Trainer
from equipoise.names.extensions import names_of_extensions
from tests.support.programs import EQUIPOISE, Program


def only_run(root: Path, kind: str = "outputs") -> Path:
    runs = [path.parent for path in (root / kind).glob("*/*/**/config.yaml")]
    assert len(runs) == 1, runs
    return runs[0]


def newest_run(root: Path) -> Path:
    return max((path.parent for path in (root / "outputs").glob("*/*/config.yaml")), key=lambda path: path.name)


def rows(run: Path) -> list[dict[str, str]]:
    """Return what the module logged; readings of memory have rows of their own."""
    others = ("epoch", "step", "memory/")
    with (run / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if any(row[name] for name in row if not name.startswith(others))]


@pytest.mark.thorough
@pytest.mark.whole_package
def test_one_folder_holds_everything_and_the_configuration_as_it_was_resolved(project, equipoise):
    code, _, _ = equipoise("fit", "callbacks.memory_logger.leaks=true", "module.lr=0.25", "+mine=${module.lr}")
    assert code == 0
    assert Path.cwd() == project
    run = only_run(project)
    assert {"config.yaml", "metrics.csv", "report.html", "checkpoints"} <= {path.name for path in run.iterdir()}
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["epoch=0-step=2.ckpt"]
    assert {path.name for path in project.iterdir()} == {"conf", "tiny", "outputs"}
    kept = yaml.safe_load((run / "config.yaml").read_text())
    assert kept["module"] == {"_target_": "tiny.module.Line", "lr": 0.25, "sizes": [1, 1], "settings": {"bias": True}}
    assert kept["mine"] == 0.25
    assert kept["stage"] == "fit"
    assert kept["output_dir"] == kept["logger"]["csv"]["save_dir"] == str(run)
    assert "${" not in (run / "config.yaml").read_text()


@pytest.mark.thorough
def test_a_recorded_configuration_repeats_its_run_elsewhere_unless_the_seed_is_another(project, equipoise):
    equipoise("fit", "seed=1", "module.lr=0.25", "~callbacks.memory_logger")
    first = only_run(project)
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    code, _, _ = equipoise("fit", "--config-dir", str(first))
    assert code == 0
    second = newest_run(project)
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    assert (second / "metrics.csv").read_text() == (first / "metrics.csv").read_text()
    kept = yaml.safe_load((second / "config.yaml").read_text())
    assert kept["module"]["lr"] == 0.25
    assert kept["output_dir"] == kept["logger"]["csv"]["save_dir"] == str(second)
    assert equipoise("fit", "--config-dir", str(first), "seed=2")[0] == 0
    assert (newest_run(project) / "metrics.csv").read_text() != (first / "metrics.csv").read_text()
    checkpoint = str(next(first.glob("checkpoints/*.ckpt")))
    code, _, _ = equipoise("validate", "--config-dir", str(first), f"ckpt_path={checkpoint}")
    assert code == 0


@pytest.mark.thorough
def test_constructors_take_plain_values(project, equipoise, monkeypatch):
    modules = []
    monkeypatch.setattr(Trainer, "fit", lambda self, model, **kwargs: modules.append(model))
    equipoise("fit")
    assert modules[0].given == {"lr": 0.1, "sizes": [1, 1], "settings": {"bias": True}}
    assert [type(value) for value in modules[0].given.values()] == [float, list, dict]
    assert type(modules[0].hparams["settings"]) is dict


@pytest.mark.thorough
@pytest.mark.whole_package
def test_overrides_reach_the_trainer(project, equipoise, monkeypatch):
    trainers = []
    monkeypatch.setattr(Trainer, "fit", lambda self, model, **kwargs: trainers.append(self))
    equipoise(
        "fit",
        "trainer.max_epochs=7",
        "trainer.limit_train_batches=0.5",
        "trainer.accumulate_grad_batches=2",
        "strategy=single_device",
        "precision=64-true",
        "logger=[csv,tensorboard]",
        "callbacks=[early_stopping,timer,no_grad_evaluation]",
        "callbacks.early_stopping={monitor: val_loss, patience: 9}",
        "callbacks.timer.duration={hours: 1}",
        "callbacks.no_grad_evaluation.dataloader=test_dataloader",
        "callbacks.no_grad_evaluation.metrics={_target_: torchmetrics.classification.BinaryAccuracy, threshold: 0.3}",
    )
    trainer = trainers[0]
    assert (trainer.max_epochs, trainer.limit_train_batches, trainer.accumulate_grad_batches) == (7, 0.5, 2)
    assert trainer.precision == "64-true"
    assert [type(logger).__name__ for logger in trainer.loggers] == ["CSVLogger", "TensorBoardLogger"]
    assert trainer.early_stopping_callback.patience == 9
    assert {"EarlyStopping", "Timer", "RunSummary", "ModelCheckpoint"} <= {type(c).__name__ for c in trainer.callbacks}
    (evaluation,) = (each for each in trainer.callbacks if isinstance(each, NoGradEvaluation))
    assert (evaluation.dataloader, evaluation.metrics.threshold) == ("test_dataloader", 0.3)
    assert Path(trainer.default_root_dir) == only_run(Path.cwd())


@pytest.mark.thorough
def test_loggers_write_into_the_folder(project, equipoise):
    equipoise("fit", "logger=[csv,tensorboard]")
    run = only_run(project)
    assert [row["step"] for row in rows(run) if row["train_loss"]] == ["0", "1"]
    assert len(list((run / "tensorboard").glob("events.*"))) == 1


@pytest.mark.thorough
def test_no_logger(project, equipoise):
    assert equipoise("fit", "logger=none")[0] == 0
    assert not (only_run(project) / "metrics.csv").exists()
    assert list((only_run(project) / "checkpoints").iterdir())


@pytest.mark.thorough
def test_a_test_without_checkpoints_takes_the_weights_there_are(project, equipoise):
    code, out, _ = equipoise("fit", "test=true", "trainer.fast_dev_run=true")
    assert code == 0
    assert "test_loss" in out


@pytest.mark.thorough
def test_no_test_step_is_said_not_raised(project, equipoise):
    module = project / "tiny" / "module.py"
    module.write_text(module.read_text().replace("test_step", "other_step"))
    with pytest.warns(UserWarning, match="no test is run"):
        assert equipoise("fit", "test=true")[0] == 0


@pytest.mark.thorough
def test_evaluating_a_checkpoint_or_announced_fresh_weights(project, equipoise):
    equipoise("fit", "trainer.max_epochs=3")
    trained = rows(only_run(project))[-1]
    code, _, err = equipoise("validate")
    assert code == 0
    assert err.startswith("equipoise: ckpt_path is null, so ")
    assert "ckpt_path=best" in err
    code, _, err = equipoise("validate", "ckpt_path=last")
    assert code == 0
    assert "ckpt_path is null" not in err
    assert rows(newest_run(project))[-1]["val_loss"] == trained["val_loss"]
    path = next(project.glob("outputs/*/*/checkpoints/*.ckpt"))
    assert "=" in path.name  # which Hydra's grammar does not take unquoted
    assert equipoise("test", f"ckpt_path={path}")[0] == 0
    assert float(rows(newest_run(project))[-1]["test_loss"]) == float(trained["val_loss"])


@pytest.mark.thorough
def test_predictions_are_kept_and_their_place_is_printed(project, equipoise):
    code, out, _ = equipoise("predict")
    assert code == 0
    place = (only_run(project) / "predictions.pt").relative_to(project)
    assert f"Predictions: {place}\n" in out
    batches = torch.load(only_run(project) / "predictions.pt", weights_only=True)
    assert [batch.shape for batch in batches] == [(4, 1), (4, 1)]


@pytest.mark.thorough
def test_last_resumes_where_the_newest_run_ended(project, equipoise):
    equipoise("fit", "seed=0", "trainer.max_epochs=4")
    whole = torch.load(next((newest_run(project) / "checkpoints").iterdir()), weights_only=True)
    equipoise("fit", "seed=0", "trainer.max_epochs=2")
    equipoise("fit", "trainer.max_epochs=4", "ckpt_path=last")
    resumed = torch.load(next((newest_run(project) / "checkpoints").iterdir()), weights_only=True)
    assert resumed["global_step"] == whole["global_step"] == 8
    torch.testing.assert_close(resumed["state_dict"], whole["state_dict"], rtol=0, atol=0)


@pytest.mark.thorough
@pytest.mark.whole_package
def test_a_resumed_run_keeps_its_best(project, equipoise, caplog):
    """Table, record, test and `ckpt_path=best` of a run in another folder mean the same file."""
    monitoring = ["callbacks=[model_checkpoint]", "callbacks.model_checkpoint={monitor: val_loss, mode: max}"]
    monitoring.append("+callbacks.last={_target_: lightning.pytorch.callbacks.ModelCheckpoint, filename: last}")
    equipoise("fit", *monitoring, "trainer.max_epochs=2")
    first = only_run(project)
    # The loss falls, so the first epoch stays the best.
    best = next(path for path in (first / "checkpoints").iterdir() if path.name.startswith("epoch=0"))
    score = next(float(row["val_loss"]) for row in rows(first) if row["val_loss"])
    caplog.set_level(logging.INFO)
    _, out, err = equipoise("fit", *monitoring, "trainer.max_epochs=3", "test=true", "ckpt_path=last")
    assert "  trainer.max_epochs: 2 -> 3\n" in err
    assert f"Best checkpoint: {best.relative_to(project)}" in out
    assert f"Restoring states from the checkpoint path at {best}" in caplog.text
    assert "test_loss" in out
    shown = next(line for line in out.splitlines() if "best val_loss" in line)
    assert float(shown.split()[-1]) == pytest.approx(score, rel=1e-3)
    report = (newest_run(project) / "report.html").read_text()
    assert str(best.relative_to(project)) in report
    caplog.clear()
    assert equipoise("validate", *monitoring, "ckpt_path=best")[0] == 0
    assert f"Restoring states from the checkpoint path at {best}" in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("choice", ["last", "best"])
def test_a_fit_goes_on_from_nothing_only_where_it_is_started_again(project, equipoise, monkeypatch, choice):
    code, _, err = equipoise("fit", f"ckpt_path={choice}")
    assert code == 2
    assert f"ckpt_path={choice}, but no earlier run of this module left a checkpoint" in err
    assert "Leave ckpt_path out to begin a new run" in err
    assert not (project / "outputs").exists()
    if choice == "last":
        # Slurm starts a job that it has stopped by the same command as the first time.
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        with pytest.warns(UserWarning, match="last"):
            assert equipoise("fit", "ckpt_path=last")[0] == 0


@pytest.mark.thorough
def test_metrics_go_on_in_a_folder_named_by_hand_and_those_of_a_run_begun_anew_are_apart(project, equipoise):
    def steps(name="metrics.csv"):
        with (project / "here" / name).open() as file:
            return [row["step"] for row in csv.DictReader(file) if row["train_loss"]]

    equipoise("fit", "hydra.run.dir=here")
    equipoise("fit", "hydra.run.dir=here", "ckpt_path=last", "trainer.max_epochs=2")
    assert steps() == ["0", "1", "2", "3"]
    assert not list(project.glob("here/metrics_*.csv"))
    equipoise("fit", "hydra.run.dir=here")
    assert steps("metrics_0.csv") == ["0", "1", "2", "3"]
    assert steps() == ["0", "1"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "overrides",
    [
        "trainer.devices=cuda:0",  # refused by the constructor of the trainer
        "callbacks=[early_stopping] callbacks.early_stopping.monitor=val/loss",  # after the sanity check
        "module.sizes=[1,0.5]",  # an error of the module's own constructor
    ],
)
def test_a_configuration_that_is_refused_leaves_no_run(project, equipoise, overrides):
    with suppress(TypeError):
        assert equipoise("fit", *overrides.split())[0] == 2
    assert not (project / "outputs").exists()
    equipoise("fit", "hydra.run.dir=here")
    before = {path: path.read_bytes() for path in (project / "here").rglob("*.*") if path.is_file()}
    with suppress(TypeError):
        assert equipoise("fit", *overrides.split(), "hydra.run.dir=here")[0] == 2
    assert {path: path.read_bytes() for path in (project / "here").rglob("*.*") if path.is_file()} == before


@pytest.mark.slow
def test_a_sweep_has_a_folder_for_each_job(project, equipoise):
    code, out, _ = equipoise("fit", "module.lr=0.1,0.2", "--multirun", "seed=0")
    assert code == 0
    jobs = sorted(path.parent for path in project.glob("multirun/*/*/*/config.yaml"))
    assert [job.name for job in jobs] == ["0", "1"]
    assert [yaml.safe_load((job / "config.yaml").read_text())["module"]["lr"] for job in jobs] == [0.1, 0.2]
    assert rows(jobs[0])[-1] != rows(jobs[1])[-1]
    assert not (project / "outputs").exists()
    # Each extension that makes a page of a sweep has made one.
    assert len(list(project.glob("multirun/*/*/*.html"))) == len(names_of_extensions("sweep_pages"))
    # Both results end the output, as they do with `launcher=pool`.
    table = out[out.index("Sweep: 2 done") :]
    assert "module.lr" in table
    assert "device" not in table
    with next(project.glob("multirun/*/*/results.csv")).open() as file:
        results = list(csv.DictReader(file))
    assert [(row["module.lr"], row["state"]) for row in results] == [("0.1", "done"), ("0.2", "done")]
    for row, job in zip(results, jobs, strict=True):
        assert Path(row["folder"]) == job
        assert float(row["val_loss"]) == float(rows(job)[-1]["val_loss"])
        assert f"{float(row['val_loss']):#.4g}" in table


@pytest.mark.thorough
def test_a_sweep_shows_what_failed_beside_what_ran(project, equipoise):
    code, out, err = equipoise("fit", "trainer.limit_train_batches=1,-2", "--multirun", "seed=0")
    assert code == 2
    # A launcher such as submitit logs in the folder of a job after it.
    assert next(project.glob("multirun/*/*/1")).is_dir()
    assert "Error executing job" not in err
    assert err.splitlines()[-1] == "In job 1: trainer.limit_train_batches=-2 seed=0."
    assert len(list(project.glob("multirun/*/*/0/checkpoints/*"))) == 1
    assert "Sweep: 1 done, 1 failed" in out
    assert "Job 1: ConfigurationError: " in out
    with next(project.glob("multirun/*/*/results.csv")).open() as file:
        assert [row["state"] for row in csv.DictReader(file)] == ["done", "failed"]


@pytest.mark.thorough
def test_two_runs_never_share_a_folder(project, equipoise):
    for _ in range(2):
        equipoise("fit", "trainer.fast_dev_run=true")
    assert len(list(project.glob("outputs/*/*/config.yaml"))) == 2


@pytest.mark.thorough
def test_config_dir_comes_before_the_folder_where_it_stands(project, equipoise):
    (project / "more" / "module").mkdir(parents=True)
    (project / "more" / "module" / "line.yaml").write_text(
        "_target_: tiny.module.Line\nlr: 7.0\nsizes: [1, 2]\nsettings: {}\n"
    )
    code, out, _ = equipoise("fit", "--config-dir", "more", "--cfg", "job", "--package", "module.lr")
    assert (code, out.strip()) == (0, "7.0")
    code, out, _ = equipoise("fit", "--config-dir=more", "--cfg", "job", "--package", "data.count")
    assert (code, out.strip()) == (0, "8")


@pytest.mark.thorough
def test_a_hydra_main_of_ones_own(project, monkeypatch):
    import hydra

    from equipoise.app import run

    metrics = []
    monkeypatch.setattr(sys, "argv", ["train.py", "module.lr=0.2"])
    monkeypatch.syspath_prepend(project)
    hydra.main(version_base="1.3", config_path=str(project / "conf"), config_name="config")(
        lambda config: metrics.append(run(config))
    )()
    assert set(metrics[0]) == {"train_loss", "val_loss"}
    assert all(type(value) is float for value in metrics[0].values())
    assert yaml.safe_load((only_run(project) / "config.yaml").read_text())["module"]["lr"] == 0.2


@pytest.mark.thorough
def test_an_interrupt_ends_with_130_and_everything_released(project, equipoise):
    module = project / "tiny" / "module.py"
    module.write_text(
        module.read_text().replace(
            "loss = (self",
            "import os, signal; batch_idx and os.kill(os.getpid(), signal.SIGINT)\n        loss = (self",
        )
    )
    code, _, err = equipoise("fit")
    assert code == 130
    assert "interrupted" in err
    assert "There is no checkpoint of this fit. Lost: 1 step." in err
    assert "Traceback" not in err
    assert [row["train_loss"] for row in rows(only_run(project))]  # what was logged until then is on disk
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "log" not in vars(sys.modules["tiny.module"].Line)
    assert equipoise("fit", "trainer.fast_dev_run=true", "trainer.limit_train_batches=1")[0] == 0


@pytest.mark.thorough
def test_an_interrupt_says_how_to_go_on(project, equipoise):
    module = project / "tiny" / "module.py"
    kill = "import os, signal; self.global_step == 3 and os.kill(os.getpid(), signal.SIGINT)\n        loss = (self"
    module.write_text(module.read_text().replace("loss = (self", kill))
    code, _, err = equipoise("fit", "trainer.max_epochs=4")
    assert code == 130
    (path,) = (only_run(project) / "checkpoints").iterdir()
    way_out = f"ckpt_path='{path.relative_to(project)}' continues."
    assert f"The newest checkpoint is of step 2. Lost: 1 step. {way_out}" in " ".join(err.split())
    assert "The same command with ckpt_path=last does so, too." in err


@pytest.mark.thorough
def test_a_mistake_of_the_users_own_keeps_its_traceback(project, equipoise):
    module = project / "tiny" / "module.py"
    module.write_text(module.read_text().replace("return loss", "raise ZeroDivisionError('mine')"))
    with pytest.raises(ZeroDivisionError, match="mine"):
        equipoise("fit")
    assert "HYDRA_FULL_ERROR" not in os.environ
    with Program(EQUIPOISE, "fit") as program:
        _, err = program.finish()
        assert program.returncode == 1
    _, _, shown = err.partition("Traceback (most recent call last):\n")
    frames = [line for line in shown.splitlines() if line.startswith("  File ")]
    assert [frame.rpartition(" ")[2] for frame in frames] == ["training_step"]


def test_a_module_may_bring_its_own_loaders(project, equipoise):
    module = project / "tiny" / "module.py"
    module.write_text(module.read_text() + "\n    def train_dataloader(self):\n        return torch.ones(3, 2, 1)\n")
    assert equipoise("fit", "~data", "trainer.limit_val_batches=0")[0] == 0
    assert issubclass(sys.modules["tiny.module"].Line, LightningModule)


@pytest.mark.thorough
@pytest.mark.whole_package
def test_a_run_elsewhere(project, equipoise, memory_files):
    """All files of a run, its continuation, its evaluation and its predictions."""
    place = "output_dir=memory://run"
    assert equipoise("fit", place)[0] == 0
    names = {"config.yaml", "metrics.csv", "hparams.yaml", "report.html", "run.json", "checkpoints"}
    assert {name.rpartition("/")[2] for name in memory_files.ls("/run", detail=False)} == names
    assert {path.name for path in project.iterdir()} == {"conf", "tiny"}
    code, out, _ = equipoise("fit", place, "ckpt_path=last", "trainer.max_epochs=2")
    assert code == 0
    assert "memory://run/report.html" in out.replace("\n", "")
    assert memory_files.glob("memory://run/checkpoints/*") == ["/run/checkpoints/epoch=1-step=4.ckpt"]
    with memory_files.open("memory://run/metrics.csv", "r", newline="") as file:
        steps = [row["step"] for row in csv.DictReader(file) if row["train_loss"]]
    assert steps == ["0", "1", "2", "3"]
    assert yaml.safe_load(memory_files.cat("memory://run/config.yaml"))["output_dir"] == "memory://run"
    assert "ckpt_path is null" not in equipoise("test", place, "ckpt_path=best")[2]
    assert equipoise("predict", place, "ckpt_path=last")[0] == 0
    with memory_files.open("memory://run/predictions.pt") as file:
        assert torch.load(file)
    assert {path.name for path in project.iterdir()} == {"conf", "tiny"}


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
def test_hydra_writes_here(key, project, equipoise):
    code, _, err = equipoise("fit", f"{key}=memory://run")
    assert code
    assert f"{key}=memory://run: Hydra writes its log to this machine alone" in err.replace("\n", " ")
    assert "output_dir=memory://run" in err.replace("\n", " ")
    assert {path.name for path in project.iterdir()} == {"conf", "tiny"}


@pytest.mark.thorough
def test_a_launcher_writes_here(project, equipoise):
    code, _, err = equipoise("fit", "launcher=pool", "output_dir=memory://run")
    assert code
    assert "With a launcher, output_dir is a folder" in err.replace("\n", " ")
