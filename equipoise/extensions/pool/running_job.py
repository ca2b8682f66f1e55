"""A job of the pool: its process, its device and its result."""

import os
import sys
import traceback
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from equipoise.app.sweeps.jobs import SweepJob
from equipoise.app.sweeps.progress import reporting_to
from equipoise.app.sweeps.results import JobResult
from equipoise.parallel.payload.authentication import new_key
from equipoise.parallel.payload.shared_payload import SharedPayload
from equipoise.parallel.workers.main_script import hidden
from equipoise.parallel.workers.messages.reports import raise_first_cause
from equipoise.parallel.workers.preloading import preloading
from equipoise.parallel.workers.worker_main import Job, send_to_parent
from equipoise.parallel.workers.worker_process import Task, WorkerProcess

__all__ = ["RunningJob"]


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
class RunningJob:
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
    def start(cls, job: SweepJob, result: JobResult, device: torch.device, count: int) -> "RunningJob":
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
        """End the process, immediately if it still runs."""
        self.worker.end()
        self.payload.close()
        self.value.close()
