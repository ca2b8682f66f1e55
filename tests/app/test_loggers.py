"""Loggers of services: a missing package is one early message; with the packages, wandb offline and MLflow on files."""

import csv
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.app import build
from equipoise.app.build import check_loggers
from equipoise.app.running import _wandb_finished
from equipoise.errors import ConfigurationError
from tests.support.programs import EQUIPOISE, Program

LIGHTNINGS = "lightning.pytorch.loggers"
MLFLOW = ("mlflow", f"{LIGHTNINGS}.MLFlowLogger")


# Prints the runs of a database, in their order.
READ_MLFLOW = """
import json
from mlflow.tracking import MlflowClient

client = MlflowClient("sqlite:///run/mlflow.db")
(experiment,) = client.search_experiments(filter_string="name = 'lightning_logs'")
runs = []
for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]):
    losses = [metric.value for metric in client.get_metric_history(run.info.run_id, "train_loss")]
    artifacts = [artifact.path for artifact in client.list_artifacts(run.info.run_id)]
    entry = {"status": run.info.status, "lr": run.data.params["lr"], "losses": losses, "artifacts": artifacts}
    runs.append(entry)
print(json.dumps(runs))
"""


def checked(name: str, target: str, **options: Any) -> None:
    check_loggers({"logger": {name: {"_target_": target, **options}, "left_out": None}})


@pytest.mark.parametrize(
    ("name", "target", "package"),
    [
        ("wandb", "WandbLogger", "wandb"),
        ("mlflow", "MLFlowLogger", "mlflow"),
        ("comet", "CometLogger", "comet-ml"),
        ("tensorboard", "TensorBoardLogger", "tensorboard"),
    ],
)
def test_the_missing_package_is_named(name, target, package, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "find_spec", asked.append)
    with pytest.raises(ConfigurationError, match=rf"logger\.{name} needs {package}, .*: pip install {package}\."):
        checked(name, f"{LIGHTNINGS}.{target}")
    assert asked[0] == package.replace("-", "_")
    monkeypatch.setattr(build, "find_spec", lambda module: module if module == asked[-1] else None)
    checked(name, f"{LIGHTNINGS}.{target}")


def test_loggers_of_others_are_not_asked_for_packages(monkeypatch):
    monkeypatch.setattr(build, "find_spec", lambda module: None)
    checked("csv", f"{LIGHTNINGS}.CSVLogger")
    checked("mine", "my_project.loggers.WandbLogger")


def test_a_missing_package_leaves_no_folder(project, equipoise, monkeypatch):
    monkeypatch.setattr(build, "find_spec", lambda module: None)
    code, _, err = equipoise("fit", "logger=[csv,wandb]")
    assert (code, err.count("\n")) == (2, 1), err
    assert not (project / "outputs").exists()


def test_a_database_is_a_local_file(monkeypatch):
    monkeypatch.setattr(build, "find_spec", lambda module: module)
    checked(*MLFLOW, tracking_uri="sqlite:////tmp/run/mlflow.db")
    checked(*MLFLOW, tracking_uri="http://localhost:5000")
    with pytest.raises(ConfigurationError, match=r"a file of this machine, not 'sqlite:///s3://bucket/run/mlflow.db'"):
        checked(*MLFLOW, tracking_uri="sqlite:///s3://bucket/run/mlflow.db")


@pytest.mark.parametrize(
    ("rank", "address", "expected"),
    [
        (None, "sqlite:///run/mlflow.db", "sqlite:///run/mlflow.db"),
        (0, "sqlite:///run/mlflow.db", "sqlite:///run/mlflow.db"),
        (1, "sqlite:///run/mlflow.db", "sqlite:///:memory:"),
        (1, "http://localhost:5000", "http://localhost:5000"),
    ],
)
def test_one_process_of_torchrun_creates_the_database(rank, address, expected, monkeypatch):
    """Another one that creates its tables at the same time would fail."""
    found = None if rank is None else SimpleNamespace(global_rank=rank)
    monkeypatch.setattr(build, "find_rank", lambda: found)
    assert build._in_this_rank({"_target_": MLFLOW[1], "tracking_uri": address})["tracking_uri"] == expected


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_a_run_of_wandb_ends_with_ours(error, monkeypatch):
    """With its state, and only if it began in ours."""
    codes: list[int] = []
    run = SimpleNamespace(finish=lambda exit_code: codes.append(exit_code))
    wandb: Any = SimpleNamespace(run=None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    with pytest.raises(error) if error else nullcontext(), _wandb_finished():
        wandb.run = run
        if error:
            raise error
    assert codes == [0 if error is None else 1]
    with _wandb_finished():
        pass
    assert len(codes) == 1


# With the packages, under ddp


def fit(project: Path, *arguments: str) -> None:
    """Run the command in a process of its own."""
    devices = ("strategy=ddp", "trainer.devices=[cpu,cpu]", "callbacks=[model_checkpoint]")
    with Program(EQUIPOISE, "fit", *devices, *arguments, folder=project, starts_workers=True) as program:
        complaints = program.finish()[1]
        assert program.returncode == 0, complaints


def logged(folder: Path) -> list[float]:
    """Return the losses of steps, as the CSV logger has written them."""
    with (folder / "metrics.csv").open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


def records(path: Path) -> Iterator[Any]:
    """Yield the records of wandb's file: blocks of 32 KiB with parts of records, each after its length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    start, record = 7, b""
    while start + 7 <= len(content):
        if start % 2**15 > 2**15 - 7:
            start += 2**15 - start % 2**15
            continue
        length, kind = struct.unpack_from("<HB", content, start + 4)
        record += content[start + 7 : start + 7 + length]
        start += 7 + length
        # It was all of a record, or its last part.
        if kind in (1, 4):
            yield Record.FromString(record)
            record = b""


@pytest.mark.slow
def test_wandb_offline(project):
    """Each job of a sweep in one process is a run of its own, which the processes of ddp have found."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    options = ("hydra.sweep.dir=jobs", "logger=[csv,wandb]", "logger.wandb.offline=true")
    fit(project, "--multirun", "module.lr=0.5,0.25", *options)
    for job, rate in enumerate(["0.5", "0.25"]):
        (path,) = project.glob(f"jobs/{job}/wandb/offline-*/*.wandb")
        found = list(records(path))
        settings = {item.key: item.value_json for record in found for item in record.config.update}
        assert settings["lr"] == rate
        values = [{item.nested_key[0]: item.value_json for item in record.history.item} for record in found]
        losses = [float(each["train_loss"]) for each in values if "train_loss" in each]
        assert losses == pytest.approx(logged(project / "jobs" / str(job)), rel=1e-6)
        assert len(losses) == 1
        assert [record.exit.exit_code for record in found if record.HasField("exit")] == [0]


@pytest.mark.slow
def test_mlflow_on_local_files(project):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    options = ("hydra.run.dir=run", "logger=[csv,mlflow]", "logger.mlflow.log_model=all")
    fit(project, *options)
    fit(project, *options, "ckpt_path=last", "trainer.max_epochs=2")
    # MLflow imports much, and sets what a process keeps.
    done = subprocess.run([sys.executable, "-c", READ_MLFLOW], cwd=project, capture_output=True, text=True, check=True)
    first, second = json.loads(done.stdout)
    assert [first["status"], second["status"]] == ["FINISHED", "FINISHED"]
    assert first["lr"] == "0.1"
    assert first["losses"] + second["losses"] == pytest.approx(logged(project / "run"), rel=1e-6)
    assert first["artifacts"] == ["epoch=0-step=1"]
    assert list(project.glob("run/mlartifacts/*/artifacts/*/*.ckpt"))
    assert not (project / "mlruns").exists()
