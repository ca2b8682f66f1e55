"""Under Ray, from its package: programs of their own start small clusters and end them."""

import contextlib
import csv
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from equipoise import ConfigurationError, Trainer
from tests.extensions.ray.ray_program import EPOCHS, KILLS, Net, Weights, loader
from tests.support.commands import FILES
from tests.support.equality import assert_equal
from tests.support.projects import write
from tests.support.quiet import QUIET

ROOT = Path(__file__).parents[3]
# Against a hang; a busy machine takes minutes.
LIMIT = 900

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * LIMIT),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
]


# Ray gives its own processes half a minute to start, which is too little on a machine that has much else to do.
STARTS = 5
NOT_STARTED = "The current node timed out during startup"


def run(folder: Path, *arguments: str, once: Callable[..., tuple[int, str]] | None = None) -> tuple[int, str]:
    """Run a program to its end, or by a function `once`, anew as long as Ray could not start in time."""
    for _ in range(STARTS):
        code, out = (once or run_once)(folder, *arguments)
        if NOT_STARTED not in out:
            break
        for name in ("outputs", "multirun"):
            shutil.rmtree(folder / name, ignore_errors=True)
    return code, out


def run_once(folder: Path, *arguments: str) -> tuple[int, str]:
    with started(folder, *arguments) as program:
        out, _ = program.communicate(timeout=LIMIT)
    return program.returncode, out


@contextlib.contextmanager
def started(folder: Path, *arguments: str):
    """Start a program in a session of its own, of which nothing is left."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray would kill workers where other programs use the memory of the machine.
        "RAY_memory_monitor_refresh_ms": "0",
    }
    program = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield program
    finally:
        # Ray's processes belong to the session, unless it has ended them already.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def outcome_of(folder: Path, part: str):
    code, out = run(folder, "tests.extensions.ray.ray_program", str(folder), part)
    assert code == 0, out[-5000:]
    return json.loads((folder / "outcome.json").read_text())[part]


def test_killed_workers_end_with_the_weights_of_an_undisturbed_run(tmp_path):
    outcome = outcome_of(tmp_path, "killed")
    killed = sorted(path.name for path in tmp_path.glob("killed-*"))
    assert killed == sorted(f"killed-{rank}-{step}" for rank, step in KILLS)

    # Two processes without Ray and without an interruption.
    plain = tmp_path / "plain.pt"
    place = {"strategy": "ddp", "devices": 2, "accelerator": "cpu"}
    Trainer(max_epochs=EPOCHS, callbacks=[Weights(str(plain))], **place, **QUIET).fit(Net(), loader())
    actual = torch.load(tmp_path / "weights.pt")
    expected = torch.load(plain)
    assert actual["world_size"] == expected["world_size"] == 2
    assert actual["steps"] == expected["steps"] == outcome["metrics"]["step"]
    assert_equal(expected["weights"], actual["weights"])
    assert outcome["checkpoint"]


def test_rays_own_callback(tmp_path):
    outcome = outcome_of(tmp_path, "own")
    assert outcome["files"] == ["checkpoint.ckpt"]
    assert outcome["metrics"]["epoch"] == 0
    assert outcome["metrics"]["train_loss"] > 0


@pytest.mark.filterwarnings("ignore")
def test_strategies_and_environment_of_ray_are_refused(monkeypatch):
    """Ray has them for Lightning's trainer, and so is its check of that trainer."""
    # Ray sets it when it is imported.
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")
    from ray.train import lightning as rays

    for kind in (rays.RayDDPStrategy, rays.RayFSDPStrategy):
        message = rf"{kind.__name__}.*in a worker of Ray `Trainer\(\)` asks Ray for its place"
        with pytest.raises(ConfigurationError, match=message):
            Trainer(strategy=kind())
    with pytest.raises(ConfigurationError, match=r"not RayLightningEnvironment\. Leave it out: .* in a worker of Ray"):
        Trainer(plugins=[rays.RayLightningEnvironment()])
    with pytest.raises(RuntimeError, match="Invalid strategy class"):
        rays.prepare_trainer(Trainer(accelerator="cpu", **QUIET))


def test_trials_report_or_say_that_reports_would_be_lost(tmp_path):
    *reporting, launched = outcome_of(tmp_path, "trials")
    for trial in reporting:
        assert trial["error"] is None
        assert trial["metrics"]["train_loss"] > 0
        assert trial["metrics"]["training_iteration"] == 2
    assert "RayReport reports to Ray, but the strategy would start processes of its own" in launched["error"]


@pytest.fixture
def project(tmp_path):
    write(tmp_path, FILES)
    return tmp_path


def test_a_run_in_two_workers_from_the_command_line(project):
    code, out = run(
        project,
        *("equipoise", "fit", "launcher=ray", "launcher.workers=2", "launcher.cpus_per_worker=0.5", "seed=0"),
        *("trainer.max_epochs=2", "callbacks=[model_checkpoint]"),
    )
    assert code == 0, out[-5000:]
    (folder,) = (path.parent for path in project.glob("outputs/*/*/config.yaml"))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["launcher"]["workers"] == 2
    with (folder / "metrics.csv").open() as file:
        losses = [row["val_loss"] for row in csv.DictReader(file) if row["val_loss"]]
    assert len(losses) == 2
    (checkpoint,) = (folder / "checkpoints").glob("*.ckpt")
    # Eight samples in batches of four, in two processes: a step an epoch.
    assert checkpoint.name == "epoch=1-step=2.ckpt"
    assert list((folder / "ray").glob("checkpoint_*/checkpoint.ckpt"))


def test_a_sweep_of_trials_from_the_command_line(project):
    code, out = run(
        project,
        *("equipoise", "fit", "--multirun", "launcher=ray", "launcher.cpus_per_worker=1", "seed=0"),
        *("objective=val_loss", "module.lr=0.1,0.2,abc", "trainer.max_epochs=2"),
    )
    assert code == 1, out[-5000:]
    assert "Sweep: 2 done, 1 failed" in out
    assert "module.lr must be of type float" in out
    (path,) = project.glob("multirun/*/*/results.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    states = [(row["module.lr"], row["state"]) for row in rows]
    assert states == [("0.1", "done"), ("0.2", "done"), ("abc", "failed")]
    for row in rows[:2]:
        with Path(row["folder"], "metrics.csv").open() as file:
            values = [line["val_loss"] for line in csv.DictReader(file) if line["val_loss"]]
        assert float(row["val_loss"]) == pytest.approx(float(values[-1]), rel=1e-6)


def test_more_workers_than_the_machine_has_cpus_for_are_refused(project):
    code, out = run(project, *("equipoise", "fit", "launcher=ray", "launcher.workers=100000"))
    assert code == 2, out[-5000:]
    assert "launcher=ray needs 100000 CPUs for its workers, but Ray finds" in out


def test_the_error_of_a_worker_is_one_message(project):
    code, out = run(
        project,
        *("equipoise", "fit", "launcher=ray", "launcher.workers=2", "launcher.cpus_per_worker=0.5"),
        "trainer.limit_val_batches=-2",
    )
    assert code == 2, out[-5000:]
    (message,) = [line for line in out.splitlines() if line.startswith("equipoise: ")]
    assert "limit_val_batches must be a number of batches" in message


# A module whose first worker waits in the first step, and keeps a pipe open as long as its process lives.
WAITS = {
    "tiny/waits.py": """
        import os
        import threading
        from tiny.module import Line

        class Waits(Line):
            def training_step(self, batch, batch_idx):
                if self.lr == 0.3 and self.global_rank == 0:
                    self.pipe = os.open("begun", os.O_WRONLY)
                    os.write(self.pipe, b"begun")
                    threading.Event().wait()
                return super().training_step(batch, batch_idx)
        """,
    "conf/module/waits.yaml": """
        _target_: tiny.waits.Waits
        lr: 0.3
        sizes: [1, 1]
        settings: {bias: true}
        """,
}


def interrupted(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a program and interrupt it."""
    write(folder, WAITS)
    os.mkfifo(folder / "begun")
    return run(folder, *arguments, once=interrupted_once)


def interrupted_once(folder: Path, *arguments: str) -> tuple[int, str]:
    """Interrupt a program as a terminal does, once a worker waits; its worker ends, too."""
    pipe = os.open(folder / "begun", os.O_RDONLY | os.O_NONBLOCK)
    with started(folder, *arguments) as program, os.fdopen(pipe, "rb", buffering=0) as worker:
        end = os.pidfd_open(program.pid)
        try:
            readable, _, _ = select.select([worker, end], [], [], LIMIT)
        finally:
            os.close(end)
        if worker in readable:
            assert worker.read(5) == b"begun"
            os.killpg(program.pid, signal.SIGINT)
        # A program that never comes so far has its reason in what it prints.
        out, _ = program.communicate(timeout=LIMIT)
        if worker in readable:
            # The pipe ends when the process of the worker does.
            readable, _, _ = select.select([worker], [], [], LIMIT)
            assert readable, "the worker continues"
            assert worker.read(5) == b""
    return program.returncode, out


def test_ctrl_c_ends_the_workers_of_a_run(project):
    code, out = interrupted(
        project,
        *("equipoise", "fit", "launcher=ray", "launcher.workers=2", "launcher.cpus_per_worker=0.5", "module=waits"),
    )
    assert code == 130, out[-5000:]
    assert "equipoise: interrupted." in out
    # Processes of Ray's may log what the interrupt broke off.
    own_lines = [line for line in out.splitlines() if " pid=" not in line]
    assert "Traceback" not in "\n".join(own_lines)


def test_ctrl_c_ends_the_trials_of_a_sweep(project):
    """On two cores one trial after the other: the first ends, the second waits, the third never begins."""
    code, out = interrupted(
        project,
        *("equipoise", "fit", "--multirun", "launcher=ray", "launcher.cpus_per_worker=2", "module=waits"),
        "module.lr=0.1,0.3,0.2",
    )
    assert code == 130, out[-5000:]
    assert "equipoise: interrupted." in out
    assert "Traceback" not in out
    (path,) = project.glob("multirun/*/*/results.csv")
    with path.open() as file:
        states = [row["state"] for row in csv.DictReader(file)]
    assert states[1] == "interrupted"
    assert {states[0], states[2]} <= {"done", "interrupted"}
