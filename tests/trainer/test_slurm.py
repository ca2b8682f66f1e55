"""Jobs of Slurm that are interrupted: a checkpoint, the queue, and the way back; in one process and in several."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from equipoise.parallel.place import slurm_job
from equipoise.trainer import slurm
from tests.conftest import ignoring
from tests.trainer.small import Small, Validated, loader, trainer

pytestmark = ignoring()
ROOT = Path(__file__).parents[2]
PATIENCE = 240.0  # seconds for everything that follows a signal

# Rank 0 says in its third batch that it is there, rank 1 in its fifth; each goes on when it was signalled.
SCRIPT = """
import json, os, signal, sys
import lightning as L, torch
from torch.utils.data import DataLoader, TensorDataset
from equipoise import Trainer

folder, waits, options = sys.argv[1], sys.argv[2] == "waits", json.loads(sys.argv[3])

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    def training_step(self, batch, batch_idx):
        if waits and self.trainer.progress.batch.total.ready == 3 + 2 * self.global_rank:
            woken, wake = os.pipe()
            os.set_blocking(wake, False)
            signal.set_wakeup_fd(wake)
            with open(f"{folder}/ready.{self.global_rank}", "w") as out:
                out.write("ready")
            while not self.trainer.received_sigterm:
                os.read(woken, 1)
            signal.set_wakeup_fd(-1)
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

torch.manual_seed(0)
module, data = Module(), TensorDataset(torch.randn(24, 3))
trainer = Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False, precision="64-true", default_root_dir=folder, **options)
trainer.fit(module, DataLoader(data, batch_size=2, shuffle=True))
if trainer.is_global_zero:
    with open(f"{folder}/weights.json", "w") as file:
        json.dump([p.tolist() for p in module.parameters()] + [trainer.global_step], file)
"""


class Job:
    """The tasks of a job in a folder, with a program `scontrol` that writes down how it was called."""

    def __init__(self, folder: Path, tasks: int = 1, options: dict[str, Any] | None = None) -> None:
        self.folder, self.tasks, self.options = folder, tasks, options or {}
        self.ranks = self.options.get("devices", tasks)
        (folder / "script.py").write_text(SCRIPT)
        program = folder / "bin" / "scontrol"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol.txt\n')
        program.chmod(0o755)

    def start(self, *, waits: bool, restarts: int = 0) -> list[subprocess.Popen[str]]:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": "77",
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": str(self.tasks),
            "SLURM_NODELIST": "localhost",
            "SLURM_RESTART_COUNT": str(restarts),
            "MASTER_PORT": str(free_port()),
        }
        command = [sys.executable, "-W", "ignore", str(self.folder / "script.py"), str(self.folder)]
        command += ["waits" if waits else "goes", json.dumps(self.options)]
        processes = []
        for rank in range(self.tasks):
            own = {**environment, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=own))
        return processes

    def interrupt(self) -> tuple[list[int], str]:
        """Runs the job, and sends each task SIGUSR1 once it waits; returns exit codes and what was said."""
        for rank in range(self.ranks):
            os.mkfifo(self.folder / f"ready.{rank}")
        with killed_if_left(self.start(waits=True)) as processes:
            for rank in range(self.ranks):
                assert (self.folder / f"ready.{rank}").read_text() == "ready"
                if rank < self.tasks:
                    processes[rank].send_signal(signal.SIGUSR1)
            return finished(processes)

    def run(self, *, restarts: int = 0) -> Any:
        """Runs the job to its end; returns its weights and steps."""
        with killed_if_left(self.start(waits=False, restarts=restarts)) as processes:
            codes, said = finished(processes)
        assert set(codes) == {0}, said
        return json.loads((self.folder / "weights.json").read_text())

    @property
    def queued(self) -> str:
        path = self.folder / "scontrol.txt"
        return path.read_text() if path.exists() else ""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def finished(processes: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    said = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    return [process.returncode for process in processes], "\n".join(said)


@contextmanager
def killed_if_left(processes: list[subprocess.Popen[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def folder(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.mkdir()
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)  # starts programs three times
def test_a_task_is_put_back_into_the_queue_and_goes_on(tmp_path: Path) -> None:
    expected = Job(folder(tmp_path, "undisturbed")).run()
    job = Job(folder(tmp_path, "interrupted"))
    codes, said = job.interrupt()
    assert codes == [os.EX_TEMPFAIL], said
    assert job.queued == "requeue 77\n"
    checkpoint = job.folder / "slurm-77.ckpt"
    assert checkpoint.is_file()
    assert not (job.folder / "weights.json").exists()
    assert job.run(restarts=1) == expected
    assert not checkpoint.exists()


@pytest.mark.slow
@pytest.mark.timeout(900)  # starts programs three times
def test_tasks_end_after_the_same_batch(tmp_path: Path) -> None:
    expected = Job(folder(tmp_path, "undisturbed"), tasks=2).run()
    job = Job(folder(tmp_path, "interrupted"), tasks=2)
    codes, said = job.interrupt()
    assert codes == [os.EX_TEMPFAIL] * 2, said
    assert job.queued == "requeue 77\n"
    assert job.run(restarts=1) == expected


@pytest.mark.slow
@pytest.mark.timeout(900)  # starts programs three times
def test_processes_of_the_trainer_end_after_the_same_batch(tmp_path: Path) -> None:
    """One task, whose trainer has started two processes; Slurm knows the task alone."""
    options = {"strategy": "ddp", "devices": 2}
    expected = Job(folder(tmp_path, "undisturbed"), options=options).run()
    job = Job(folder(tmp_path, "interrupted"), options=options)
    codes, said = job.interrupt()
    assert codes == [os.EX_TEMPFAIL], said
    assert job.queued == "requeue 77\n"
    assert job.run(restarts=1) == expected


# In this process, where one can look closer.


class Signalled(Small):
    """Sends this process a signal in its second step."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self.number = number

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            signal.raise_signal(self.number)
        return super().training_step(batch, batch_idx)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of Slurm, on a machine without `scontrol`."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("PATH", "")


def start_program_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets the fits so far, as another process does."""
    monkeypatch.setattr(slurm, "_fits", Counter())


@pytest.mark.usefixtures("job")
def test_sigterm_saves_and_does_not_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes before a job is killed, also by `scancel`; Slurm puts a preempted job back by itself."""
    with pytest.raises(SIGTERMException) as ended:
        trainer(default_root_dir=tmp_path).fit(Signalled(signal.SIGTERM), loader())
    assert ended.value.code is None
    assert (tmp_path / "slurm-77.ckpt").is_file()
    start_program_again(monkeypatch)
    run = trainer(default_root_dir=tmp_path)
    run.fit(Small(), loader())
    assert run.loaded_ckpt_path is None  # Slurm has not started this job again
    assert not (tmp_path / "slurm-77.ckpt").exists()


@pytest.mark.usefixtures("job")
def test_slurm_does_not_take_the_job_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    refused = pytest.warns(UserWarning, match="`scontrol requeue 77` failed: .*exit code 75. Submit it again")
    with refused, pytest.raises(SIGTERMException) as ended:
        trainer(default_root_dir=tmp_path).fit(Signalled(signal.SIGUSR1), loader())
    assert ended.value.code == os.EX_TEMPFAIL
    assert signal.getsignal(signal.SIGUSR1) == before
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    start_program_again(monkeypatch)
    run = trainer(default_root_dir=tmp_path)
    run.fit(Small(), loader())
    assert str(run.loaded_ckpt_path) == str(tmp_path / "slurm-77.ckpt")
    assert run.global_step == 3


@pytest.mark.usefixtures("job")
def test_each_fit_of_a_job_goes_on_from_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second of two fits is interrupted; the first one, which had ended, begins anew, and says so."""
    trainer(default_root_dir=tmp_path).fit(Small(), loader())
    with pytest.raises(SIGTERMException):
        trainer(default_root_dir=tmp_path).fit(Signalled(signal.SIGTERM), loader())
    own = tmp_path / "slurm-77-fit-2.ckpt"
    assert [path.name for path in tmp_path.glob("slurm-*")] == [own.name]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    start_program_again(monkeypatch)
    first, second = trainer(default_root_dir=tmp_path), trainer(default_root_dir=tmp_path)
    with caplog.at_level("INFO"):
        first.fit(Small(), loader())
    assert first.loaded_ckpt_path is None
    assert "Fit 1 of this program" in caplog.text
    assert own.is_file()
    first.validate(Validated(), loader())  # counts no fit
    second.fit(Small(), loader())
    assert second.loaded_ckpt_path == own
    assert not own.exists()


@pytest.mark.usefixtures("job")
def test_a_handler_of_the_programs_own_stays(tmp_path: Path) -> None:
    received = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        trainer(default_root_dir=tmp_path).fit(Signalled(signal.SIGUSR1), loader())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]
    assert not (tmp_path / "slurm-77.ckpt").exists()


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "5"}, "5"),
        ({"SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "train"}, "5"),
        ({"SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "bash"}, None),
        ({"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "4", "SLURM_ARRAY_TASK_ID": "3"}, "4_3"),
    ],
)
def test_the_name_of_a_job(environment: dict[str, str], job: str | None) -> None:
    assert slurm_job(environment) == job
