"""Jobs of Slurm that are interrupted: a checkpoint, the queue, and the way back; in one process and in several."""

import os
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import FSDPStrategy
from equipoise.parallel.communication.rank import slurm_job
from equipoise.trainer.runtime import slurm
from tests.support.ports import unused_port
from tests.support.programs import Program
from tests.support.trainer_runs import Small, Validated, loader, trainer


class Interrupted(L.LightningModule):
    """Sends SIGUSR1 in the third batch of rank 0 and in the fifth of rank 1, unless it came; each waits until it came.

    Args:
        pid: The process that receives it; 0: the own one. None: no signal is sent.
        number: The signal.
    """

    def __init__(self, pid: int | None, number: int) -> None:
        super().__init__()
        self.number = number
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.pid = pid

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.pid is not None and self.trainer.progress.batch.total.ready == 3 + 2 * self.global_rank:
            self.interrupt(self.pid or os.getpid())
        return self.net(batch[0]).square().mean()

    def interrupt(self, pid: int) -> None:
        """Send the signal, unless one has come already, and wait until it has."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        before = signal.set_wakeup_fd(wake)
        if not self.trainer.received_sigterm:
            os.kill(pid, self.number)
        while not self.trainer.received_sigterm:
            os.read(woken, 1)
        signal.set_wakeup_fd(before)
        os.close(woken)
        os.close(wake)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def train(folder: Path, *, pid: int | None = None, number: int = signal.SIGUSR1, **options: Any) -> Path | None:
    """Train in each task; the first process of all writes weights and steps into the folder.

    Returns:
        The checkpoint from which it continued.
    """
    torch.manual_seed(0)
    module, data = Interrupted(pid, number), TensorDataset(torch.randn(24, 3))
    run = trainer(max_epochs=2, precision="64-true", default_root_dir=folder, **options)
    run.fit(module, DataLoader(data, batch_size=2, shuffle=True))
    if run.is_global_zero:
        torch.save([run.global_step, *module.net.state_dict().values()], folder / "weights.pt")
    return run.loaded_ckpt_path


def undisturbed(folder: Path, **options: Any) -> Any:
    """Weights and steps of a run that is no job."""
    folder.mkdir()
    train(folder, **options)
    return result(folder)


def result(folder: Path) -> Any:
    steps, *weights = torch.load(folder / "weights.pt")
    return steps, [weight.tolist() for weight in weights]


class Job:
    """A job in a folder, with a program `scontrol` that writes down how it was called."""

    def __init__(self, folder: Path, tasks: int = 1) -> None:
        self.folder, self.tasks = folder, tasks
        self.checkpoint = folder / "slurm-77.ckpt"
        program = folder / "bin" / "scontrol"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol.txt\n')
        program.chmod(0o755)

    def environment(self, rank: int, *, restarts: int, port: int = 0) -> dict[str, str]:
        """Return the variables that Slurm and the machine set for a task."""
        return {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "77",
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": str(self.tasks),
            "SLURM_NODELIST": "localhost",
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "MASTER_PORT": str(port),
        }

    def run(self, pid: int | None = None, *, number: int = signal.SIGUSR1, restarts: int = 0) -> set[int | None]:
        """Runs all tasks, and returns their exit codes."""
        call = f"train(Path({str(self.folder)!r}), pid={pid}, number={number:d})"
        script = f"from pathlib import Path\nfrom {__name__} import train\n{call}\n"
        port = unused_port()
        with ExitStack() as stack:
            programs = []
            for rank in range(self.tasks):
                own = {**os.environ, **self.environment(rank, restarts=restarts, port=port)}
                programs.append(stack.enter_context(Program(script, environment=own)))
            print(*(program.finish()[1] for program in programs), sep="\n")
            return {program.returncode for program in programs}

    @property
    def queued(self) -> str:
        path = self.folder / "scontrol.txt"
        return path.read_text() if path.exists() else ""


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("tasks", [1, 2])
def test_tasks_end_after_the_same_batch_are_put_back_into_the_queue_and_go_on(tmp_path: Path, tasks: int) -> None:
    expected = undisturbed(tmp_path / "undisturbed", strategy="ddp" if tasks > 1 else "auto", devices=tasks)
    job = Job(tmp_path / "job", tasks)
    assert job.run(pid=0) == {os.EX_TEMPFAIL}
    assert job.queued == "requeue 77\n"
    assert job.checkpoint.is_file()
    assert not (job.folder / "weights.pt").exists()
    assert job.run(restarts=1) == {0}
    assert result(job.folder) == expected
    assert not job.checkpoint.exists()


@pytest.mark.thorough
def test_tasks_that_receive_sigterm_at_different_times_end_after_the_same_batch(tmp_path: Path) -> None:
    job = Job(tmp_path, tasks=2)
    assert job.run(pid=0, number=signal.SIGTERM) == {0}
    assert not job.queued
    assert torch.load(job.checkpoint, weights_only=True)["global_step"] >= 5
    assert not (tmp_path / "weights.pt").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        pytest.param(FSDPStrategy(checkpoints="sharded", save_in_background=True), marks=pytest.mark.slow, id="fsdp"),
    ],
)
def test_processes_of_the_trainer_end_after_the_same_batch(
    strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task, whose trainer has started two processes; Slurm knows the task alone."""
    options = {"strategy": strategy, "devices": 2}
    expected = undisturbed(tmp_path / "undisturbed", **options)
    job = Job(tmp_path / "job")
    for name, value in job.environment(0, restarts=0).items():
        monkeypatch.setenv(name, value)
    start_program_again(monkeypatch)
    with pytest.raises(SIGTERMException) as ended:
        train(job.folder, pid=os.getpid(), **options)
    assert ended.value.code == os.EX_TEMPFAIL
    assert job.queued == "requeue 77\n"
    assert job.checkpoint.is_dir() == (strategy != "ddp")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    start_program_again(monkeypatch)
    assert train(job.folder, **options) == job.checkpoint
    assert result(job.folder) == expected
    assert not job.checkpoint.exists()


@pytest.mark.thorough
def test_without_srun_one_process_starts_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch script, whose variables tell of tasks that only `srun` would start."""
    options = {"strategy": "ddp", "devices": 2}
    expected = undisturbed(tmp_path / "undisturbed", **options)
    job = Job(tmp_path / "job", tasks=2)
    for name, value in job.environment(0, restarts=0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_STEP_ID")
    assert train(job.folder, **options) is None
    assert result(job.folder) == expected


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


def interrupted(folder: Any, number: signal.Signals) -> Any:
    """A fit that a signal ends; returns the code with which the program would exit."""
    with pytest.raises(SIGTERMException) as ended:
        trainer(default_root_dir=folder).fit(Signalled(number), loader())
    return ended.value.code


def completed(folder: Any) -> Any:
    """A fit that nobody interrupts; returns its trainer."""
    run = trainer(default_root_dir=folder)
    run.fit(Small(), loader())
    assert run.global_step == 3
    return run


@pytest.mark.usefixtures("job")
def test_sigterm_saves_and_does_not_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes before a job is killed, also by `scancel`; Slurm puts a preempted job back by itself."""
    assert interrupted(tmp_path, signal.SIGTERM) is None
    assert (tmp_path / "slurm-77.ckpt").is_file()
    start_program_again(monkeypatch)
    assert completed(tmp_path).loaded_ckpt_path is None  # Slurm has not started this job again
    assert not (tmp_path / "slurm-77.ckpt").exists()


@pytest.mark.usefixtures("job")
def test_a_job_that_slurm_does_not_take_back_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.warns(UserWarning, match="`scontrol requeue 77` failed: .*exit code 75. Submit it again"):
        assert interrupted(tmp_path, signal.SIGUSR1) == os.EX_TEMPFAIL
    assert signal.getsignal(signal.SIGUSR1) == before
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    start_program_again(monkeypatch)
    assert str(completed(tmp_path).loaded_ckpt_path) == str(tmp_path / "slurm-77.ckpt")


@pytest.mark.usefixtures("job")
def test_a_job_whose_folder_is_a_url(
    memory_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    url = "memory://job/"
    interrupted(url, signal.SIGTERM)
    assert memory_files.exists("memory://job/slurm-77.ckpt")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    start_program_again(monkeypatch)
    assert completed(url).loaded_ckpt_path == "memory://job/slurm-77.ckpt"
    assert not memory_files.exists("memory://job/slurm-77.ckpt")
    # Another fit was interrupted.
    memory_files.touch("memory://job/slurm-77-fit-3.ckpt")
    with caplog.at_level("INFO"):
        completed(url)
    assert "the interrupted one was another: slurm-77-fit-3.ckpt" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("job")
def test_each_fit_of_a_job_goes_on_from_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second of two fits is interrupted; the first one, which had ended, begins anew, and says so."""
    completed(tmp_path)
    interrupted(tmp_path, signal.SIGTERM)
    own = tmp_path / "slurm-77-fit-2.ckpt"
    assert [path.name for path in tmp_path.glob("slurm-*")] == [own.name]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    start_program_again(monkeypatch)
    with caplog.at_level("INFO"):
        first = completed(tmp_path)
    assert first.loaded_ckpt_path is None
    assert "Fit 1 of this program" in caplog.text
    assert own.is_file()
    first.validate(Validated(), loader())  # counts no fit
    assert completed(tmp_path).loaded_ckpt_path == own
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
