"""Results of the jobs of a sweep, kept as they come and written as CSV."""

import csv
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from equipoise.app.sweeps.progress import Progress
from equipoise.errors import SweepError

__all__ = ["JobResult", "JobState", "SweepResults"]


class JobState(Enum):
    """States of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass
class JobResult:
    """State and result of a job.

    Attributes:
        number: Number of the job in the sweep.
        overrides: Its overrides, as on a command line.
        folder: Its folder.
        objectives: Names of the values that the sweep optimises; empty if there is none.
        state: Its state.
        device: Name of its device; empty before it runs.
        epoch: Number of its finished epochs; None before the first.
        metrics: The values that it has logged last.
        value: The value of its task.
        error: Its error; None without one.
        seconds: Time that it took; None before its end.
    """

    number: int
    overrides: Sequence[str]
    folder: Path
    objectives: Sequence[str] = ()
    state: JobState = JobState.WAITING
    device: str = ""
    epoch: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    value: Any = None
    error: BaseException | None = None
    seconds: float | None = None
    _started: float | None = None

    def begin(self, device: str = "") -> None:
        """Note that the job has begun.

        Args:
            device: Name of its device. Default: empty, unknown.
        """
        self.state = JobState.RUNNING
        self.device = device
        self._started = time.monotonic()

    def note(self, progress: Progress) -> None:
        """Note a report of the job."""
        self.metrics = dict(progress.metrics)
        if progress.epoch is not None:
            self.epoch = progress.epoch

    def finish(self, value: Any) -> None:
        """Note the end of the job, and the value of its task."""
        self._end(JobState.DONE)
        self.value = value

    def fail(self, error: BaseException) -> None:
        """Note the error of the job."""
        self._end(JobState.FAILED)
        self.error = error

    def interrupt(self) -> None:
        """Note that the job was interrupted, or has not begun because the sweep was."""
        self._end(JobState.INTERRUPTED)

    def _end(self, state: JobState) -> None:
        self.seconds = self.elapsed
        self.state = state

    @property
    def has_ended(self) -> bool:
        """True after the end of the job."""
        return self.state not in (JobState.WAITING, JobState.RUNNING)

    @property
    def elapsed(self) -> float | None:
        """Seconds since the job began, up to its end; None before it began."""
        if self.seconds is not None or self._started is None:
            return self.seconds
        return time.monotonic() - self._started

    @property
    def values(self) -> dict[str, str]:
        """Values of its overrides, by key."""
        values = {}
        for override in self.overrides:
            key, _, value = override.partition("=")
            # Signs of Hydra's grammar, for keys that are added or removed.
            values[key.lstrip("+~")] = value
        return values

    @property
    def summary_of_error(self) -> str:
        """The error in one line; empty without one."""
        if self.error is None:
            return ""
        lines = str(self.error).strip().splitlines() or [""]
        return f"{type(self.error).__name__}: {lines[0]}"


class SweepResults:
    """Results of all jobs of a sweep.

    Attributes:
        jobs: The results, in the order of the jobs.
    """

    def __init__(self) -> None:
        self.jobs: list[JobResult] = []
        # Failures that no sweeper knows of.
        self._unreported: list[JobResult] = []
        self._folder: Path | None = None

    def add(self, jobs: Sequence[JobResult], folder: Path) -> None:
        """Add jobs that are about to run.

        Args:
            jobs: Their results.
            folder: Folder of the sweep, in which results.csv is written.
        """
        self.jobs += jobs
        self._folder = folder

    def keep_failure(self, job: JobResult) -> None:
        """Keep a failure, which is raised at the end of the sweep."""
        self._unreported.append(job)

    @property
    def keys(self) -> list[str]:
        """Keys whose values differ between jobs; all of them in a sweep of one job."""
        # 1. All keys, in the order of the command line.
        keys: list[str] = []
        for job in self.jobs:
            keys += [key for key in job.values if key not in keys]
        if len(self.jobs) == 1:
            return keys
        # 2. Those with several values.
        varying = []
        for key in keys:
            values = {job.values.get(key) for job in self.jobs}
            if len(values) > 1:
                varying.append(key)
        return varying

    @property
    def metric_names(self) -> list[str]:
        """Names of all logged values, those that the sweep optimises first."""
        names: list[str] = []
        for job in self.jobs:
            candidates = [name for name in job.objectives if name in job.metrics]
            candidates += sorted(job.metrics)
            names += [name for name in dict.fromkeys(candidates) if name not in names]
        return names

    @property
    def path(self) -> Path | None:
        """Path of results.csv; None before the first job."""
        if self._folder is None:
            return None
        return self._folder / "results.csv"

    def write(self) -> None:
        """Write results.csv: a row for each job that has ended. The file is replaced atomically."""
        path = self.path
        if path is None:
            return
        keys = self.keys
        names = self.metric_names
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["job", "state", *keys, *names, "seconds", "device", "folder", "error"])
        for job in self.jobs:
            if job.has_ended:
                writer.writerow(_row(job, keys, names))
        # A reader finds the earlier file or this one, whole.
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".csv.new")
        new.write_text(text.getvalue(), encoding="utf-8")
        new.replace(path)

    def raise_failures(self) -> None:
        """Raise an error if jobs have failed, and no sweeper knows of it.

        Raises:
            SweepError: Naming the jobs.
        """
        if not self._unreported:
            return
        numbers = ", ".join(str(job.number) for job in self._unreported)
        message = (
            f"{len(self._unreported)} of {len(self.jobs)} jobs failed: {numbers}. Their errors are in the table above."
        )
        # Jobs of a cluster print where the cluster lets them.
        log = self._unreported[0].folder / "job.log"
        if log.exists():
            message += f" What a job has printed is in job.log in its folder, {log} for the first."
        raise SweepError(message)


def _row(job: JobResult, keys: Sequence[str], names: Sequence[str]) -> list[Any]:
    values = job.values
    row: list[Any] = [job.number, job.state.value]
    row += [values.get(key, "") for key in keys]
    row += [job.metrics.get(name, "") for name in names]
    seconds = ""
    if job.seconds is not None:
        seconds = f"{job.seconds:.3f}"
    return [*row, seconds, job.device, job.folder, job.summary_of_error]
