"""launcher=pool: the jobs of a sweep on devices of this machine, each in a process of its own.

    waiting jobs ──→ a free device ──→ a process with that device ──→ its result, its device is free again

A job that fails frees its device as well. A process ends with this one, whatever ends this one.
"""

import signal
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

from omegaconf import DictConfig

from equipoise.app.sweeps.jobs import SweepJob
from equipoise.app.sweeps.results import JobResult
from equipoise.app.sweeps.tables import SweepDisplay
from equipoise.errors import ConfigurationError
from equipoise.extensions.pool.running_job import RunningJob
from equipoise.parallel.workers.availability import require_workers
from equipoise.parallel.workers.preloading import preload
from equipoise.trainer.settings.devices import select_devices

__all__ = ["PoolLauncher"]

# Seconds that interrupted jobs have to release what they hold, and to save what their callbacks save.
_LEAVING = 30.0


class PoolLauncher:
    """Run the jobs of a sweep on a pool of devices of this machine, each job in a process of its own.

    A job computes on one device. What it prints goes to `job.log` in its folder. A job that fails does not end the
    others. Ctrl-C ends the jobs that run, and keeps the results so far.

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
        running: dict[Any, RunningJob] = {}
        try:
            while waiting or running:
                # 1. Start jobs on free devices.
                while waiting and free:
                    job, result = waiting.popleft()
                    process = RunningJob.start(job, result, free.popleft(), len(self._devices))
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


def _interrupt(running: list[RunningJob]) -> None:
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
