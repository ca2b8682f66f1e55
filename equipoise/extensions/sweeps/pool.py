"""launcher=pool: the jobs of a sweep on devices of this machine, each in a process of its own.

    waiting jobs ──→ a free device ──→ a process with that device ──→ its result, its device is free again

A job that fails frees its device as well. A process ends with this one, whatever ends this one.
"""

import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from equipoise.errors import ConfigurationError
from equipoise.extensions.sweeps.jobs import SweepJob
from equipoise.extensions.sweeps.progress import reporting_to
from equipoise.extensions.sweeps.results import JobResult
from equipoise.extensions.sweeps.tables import SweepDisplay
from equipoise.parallel.payload.authentication import new_key
from equipoise.parallel.payload.shared_payload import SharedPayload
from equipoise.parallel.workers.availability import require_workers
from equipoise.parallel.workers.main_script import hidden
from equipoise.parallel.workers.messages.reports import raise_first_cause
from equipoise.parallel.workers.preloading import preload, preloading
from equipoise.parallel.workers.worker_main import Job, send_to_parent
from equipoise.parallel.workers.worker_process import Task, WorkerProcess
from equipoise.trainer.settings.devices import select_devices

__all__ = ["PoolLauncher"]

# Seconds that interrupted jobs have to release what they hold, and to save what their callbacks save.
_LEAVING = 30.0


class PoolLauncher:
    """Run the jobs of a sweep on a pool of devices of this machine, each job in a process of its own.

    A job computes on one device. What it prints goes to `job.log` in its folder. A job that fails does not end the
    others. Ctrl-C ends the jobs that run, and keeps the results that there are.

    Args:
        devices: The devices, in the form of the trainer's argument: a number, indices, or names. A device that is named
            twice runs two jobs at a time. Default: "auto", all GPUs of the machine, or the CPU for one job at a time.

    Raises:
        ConfigurationError: If a device does not exist, or this system cannot start processes.

    Example:
        >>> PoolLauncher(devices=["cpu", "cpu"]).names
        ['cpu', 'cpu']
    """

    def __init__(self, *, devices: int | str | Sequence[int | str] = "auto") -> None:
        require_workers("launcher=pool", "Leave launcher out, and the jobs run one after the other")
        # A configuration has lists of its own class.
        if isinstance(devices, Sequence) and not isinstance(devices, str):
            devices = list(devices)
        self._devices = select_devices("auto", devices)

    @property
    def names(self) -> list[str]:
        """Names of the devices."""
        return [str(device) for device in self._devices]

    def check_run(self, values: Any) -> None:
        """Refuse a run that is no sweep.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            "launcher=pool runs the jobs of a sweep: add --multirun, and leave hydra/launcher to it. A single run takes"
            " its devices by trainer.devices."
        )

    def check_sweep(self, config: DictConfig) -> None:
        """Check that jobs can compute on one device of the pool.

        Args:
            config: The configuration of a job.

        Raises:
            ConfigurationError: If the job chooses devices, or another kind of them.
        """
        kind = self._devices[0].type
        devices = config.trainer.devices
        if str(devices) not in ("auto", "1"):
            raise ConfigurationError(
                f"launcher=pool gives each job one device, which contradicts trainer.devices={devices}. Name the"
                " devices of all jobs by launcher.devices alone."
            )
        machines = config.trainer.num_nodes
        if machines not in (None, 1):
            raise ConfigurationError(
                f"launcher=pool runs jobs on this machine, which contradicts trainer.num_nodes={machines}. Leave it"
                " out."
            )
        # The accelerator may have been left to the trainer, or be the right one.
        accelerator = config.trainer.accelerator
        fitting = ["auto", kind]
        if kind != "cpu":
            fitting.append("gpu")
        if accelerator not in fitting:
            raise ConfigurationError(
                f"trainer.accelerator={accelerator} does not fit launcher.devices, which are {', '.join(self.names)}."
                " Leave trainer.accelerator out."
            )

    def run_jobs(self, jobs: Sequence[SweepJob], results: Sequence[JobResult], display: SweepDisplay) -> None:
        """Run jobs, as many at a time as there are devices.

        Args:
            jobs: The jobs.
            results: Their results, which are filled in.
            display: Shows the end of each job.

        Raises:
            KeyboardInterrupt: After an interrupt, when all jobs have ended.
        """
        # A server that starts now imports the application once for all jobs.
        preload("equipoise.app.compose")
        free = deque(self._devices)
        waiting = deque(zip(jobs, results, strict=True))
        running: dict[Any, _RunningJob] = {}
        try:
            while waiting or running:
                # 1. Start jobs on free devices.
                while waiting and free:
                    job, result = waiting.popleft()
                    process = _RunningJob.start(job, result, free.popleft(), len(self._devices))
                    running[process.worker.connection] = process
                # 2. Wait for a message. A job that has ended leaves its device to the next one.
                for source in connection.wait(list(running)):
                    process = running[source]
                    process.read()
                    if process.has_ended:
                        del running[source]
                        process.conclude()
                        display.end(process.result)
                        free.append(process.device)
        except KeyboardInterrupt:
            _interrupt(list(running.values()))
            raise
        finally:
            # 3. Nothing continues after an interrupt or an error.
            for process in running.values():
                process.end()
            for job_result in results:
                if not job_result.has_ended:
                    job_result.interrupt()


@dataclass(frozen=True)
class _JobOnDevice:
    """Function of a job's process.

    Attributes:
        job: The job.
        device: Its device, as the parent sees it.
        visible: Entry of CUDA_VISIBLE_DEVICES that shows this device alone; None for other kinds of devices.
    """

    job: SweepJob
    device: torch.device
    visible: str | None

    def __call__(self, rank: int) -> Any:
        """Run the job and return the value of its task."""
        # A device that is the only one is also that of code which names none.
        if self.visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible
        _print_into(self.job.folder / "job.log")
        job = self.job.with_trainer({"accelerator": self.device.type, "devices": 1})
        try:
            with reporting_to(send_to_parent):
                return job.run()
        except BaseException:
            # The table of the sweep has the message alone.
            traceback.print_exc()
            raise


def _print_into(path: Path) -> None:
    """Let this process, and those that it starts, print into a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Text that Python still holds belongs to the earlier place.
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _visible_entry(device: torch.device) -> str | None:
    """Return the entry of CUDA_VISIBLE_DEVICES for a device; None if it is no CUDA device."""
    if device.type != "cuda":
        return None
    index = device.index or 0
    # Torch counts the devices that are visible in this process.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(index)
    return visible.split(",")[index].strip()


@dataclass
class _RunningJob:
    """A job that runs, as the parent sees it.

    Attributes:
        worker: Its process.
        result: Its result.
        device: Its device.
        payload: Contains the job.
        value: Receives the value of its task.
    """

    worker: WorkerProcess
    result: JobResult
    device: torch.device
    payload: SharedPayload
    value: SharedPayload

    @classmethod
    def start(cls, job: SweepJob, result: JobResult, device: torch.device, count: int) -> "_RunningJob":
        """Start the process of a job.

        Args:
            job: The job.
            result: Its result.
            device: Its device.
            count: Number of jobs that run at a time, which share the threads of this process.
        """
        # 1. What the process receives, and where it puts its result.
        payload = SharedPayload()
        value = SharedPayload()
        function = _JobOnDevice(job, device, _visible_entry(device))
        try:
            layout = payload.pack(Job.in_this_process(function, None, ()))
            task = Task(count, payload, layout, value, new_key())
            # 2. The process must not run the user's script again.
            with hidden(), preloading():
                worker = WorkerProcess.start(get_context("forkserver"), 0, task)
        except BaseException:
            payload.close()
            value.close()
            raise
        result.begin(str(device))
        return cls(worker, result, device, payload, value)

    def read(self) -> None:
        """Read a message of the process."""
        self.worker.read()
        while self.worker.messages:
            self.result.note(self.worker.messages.pop(0))

    @property
    def has_ended(self) -> bool:
        """True once the process has reported its end."""
        return self.worker.report is not None

    def conclude(self) -> None:
        """Take the result of a job that has ended, and end its process."""
        report = self.worker.report
        assert report is not None
        try:
            if report.failed:
                raise_first_cause(1, [report], [])
            assert report.layout is not None
            self.result.finish(self.value.unpack(report.layout))
        except Exception as error:
            self.result.fail(error)
        except BaseException as error:
            # An interrupt or an exit of the job itself.
            self.result.fail(RuntimeError(f"It ended by {type(error).__name__}."))
        finally:
            self.end()

    def end(self) -> None:
        """End the process, at once if it still runs."""
        self.worker.end()
        self.payload.close()
        self.value.close()


def _interrupt(running: list[_RunningJob]) -> None:
    """Interrupt jobs as Ctrl-C does, and give them time to release what they hold. A second Ctrl-C ends them."""
    # 1. Only this process has received the interrupt of the terminal.
    for process in running:
        process.worker.send_signal(signal.SIGINT)
    # 2. Wait for their reports.
    deadline = time.monotonic() + _LEAVING
    silent = {process.worker.connection: process for process in running}
    while silent:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return
        for source in connection.wait(list(silent), remaining):
            process = silent[source]  # type: ignore[index]
            process.read()
            if process.has_ended:
                del silent[source]  # type: ignore[arg-type]
