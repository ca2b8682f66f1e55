"""launcher=ray: a run in workers of Ray Train, or the jobs of a sweep as trials of Ray Tune."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from equipoise.app.sweeps.jobs import SweepJob
from equipoise.app.sweeps.results import JobResult
from equipoise.app.sweeps.tables import SweepDisplay
from equipoise.errors import ConfigurationError
from equipoise.extensions.ray.ray_training import WorkerResources, train_in_workers
from equipoise.extensions.ray.ray_tuning import run_trials
from equipoise.validation import check_whole, is_number

__all__ = ["RayLauncher"]


class RayLauncher:
    """Run on a Ray cluster: one run in several workers, or each job of a sweep as a trial.

    The configuration is composed once, here. The workers of a run train one model together, and report to Ray. All of
    them must reach the folder of the run. With `--multirun` each job is a trial of Ray Tune, in one process.

    Args:
        workers: Number of workers of a run. A trial of a sweep has one. Default: 1.
        cpus_per_worker: Number of CPUs of a worker or trial. Default: 1.
        gpus_per_worker: Number of GPUs of a worker or trial. Default: 0.
        max_failures: Number of failures after which the workers of a run start anew, from the last checkpoint; -1: no
            limit. Default: 0.
        every_n_train_steps: Number of optimiser steps from one checkpoint for Ray to the next. Default: None, one at
            the end of each epoch.
        address: Address of the cluster, such as "auto". Default: None, that in RAY_ADDRESS, else a cluster on this
            machine that ends with the run.

    Raises:
        ConfigurationError: If a number is out of range.

    Example:
        >>> launcher = RayLauncher(workers=2, max_failures=3)
    """

    def __init__(
        self,
        *,
        workers: int = 1,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float = 0.0,
        max_failures: int = 0,
        every_n_train_steps: int | None = None,
        address: str | None = None,
    ) -> None:
        # 1. The resources.
        check_whole("launcher.workers", workers, least=1)
        for name, value in (("cpus_per_worker", cpus_per_worker), ("gpus_per_worker", gpus_per_worker)):
            if not is_number(value) or not value >= 0:
                raise ConfigurationError(f"launcher.{name} must be a number from 0, not {value!r}.")
        # 2. What happens after a failure.
        check_whole("launcher.max_failures", max_failures, least=-1)
        check_whole("launcher.every_n_train_steps", every_n_train_steps, least=1, optional=True)
        self.resources = WorkerResources(workers, cpus_per_worker, gpus_per_worker)
        self.max_failures = max_failures
        self.every_n_train_steps = every_n_train_steps
        self.address = address

    # A run.

    def check_run(self, values: Mapping[str, Any]) -> None:
        """Check that workers can run a configuration.

        Args:
            values: The configuration in plain values.

        Raises:
            ConfigurationError: If workers would overwrite each other's predictions, or the trainer chooses devices.
        """
        if values["stage"] == "predict":
            raise ConfigurationError(
                "launcher=ray runs fit, validate and test. Its workers would overwrite each other's predictions: leave"
                " launcher out to predict here."
            )
        trainer = values["trainer"]
        if trainer.get("devices", "auto") != "auto" or trainer.get("num_nodes") is not None:
            raise ConfigurationError(
                "launcher=ray decides on devices and machines, which contradicts trainer.devices="
                f"{trainer.get('devices')} and trainer.num_nodes={trainer.get('num_nodes')}. Leave them out and give"
                " launcher.workers."
            )

    def run(
        self, run_values: Callable[[Mapping[str, Any], Sequence[Any]], dict[str, float]], values: Mapping[str, Any]
    ) -> dict[str, float]:
        """Run a configuration in the workers, and return the last metrics.

        Args:
            run_values: Runs the configuration in a worker.
            values: The configuration in plain values.
        """
        return train_in_workers(
            run_values,
            values,
            self.resources,
            address=self.address,
            max_failures=self.max_failures,
            every_n_train_steps=self.every_n_train_steps,
        )

    # A sweep.

    def check_sweep(self, config: DictConfig) -> None:
        """Check that jobs can be trials.

        Args:
            config: The configuration of a job.

        Raises:
            ConfigurationError: If an option is for workers of a run.
        """
        if self.resources.workers != 1:
            raise ConfigurationError(
                f"A job of a sweep with launcher=ray is a trial in one process, but launcher.workers="
                f"{self.resources.workers}. Leave it out. A trial with several GPUs takes launcher.gpus_per_worker=2"
                " and strategy=dp."
            )
        if self.max_failures or self.every_n_train_steps is not None:
            raise ConfigurationError(
                "launcher.max_failures and launcher.every_n_train_steps are for the workers of a run, not for a sweep."
                " Leave them out."
            )

    def run_jobs(self, jobs: Sequence[SweepJob], results: Sequence[JobResult], display: SweepDisplay) -> None:
        """Run jobs as trials, as many at a time as the cluster has resources.

        Args:
            jobs: The jobs.
            results: Their results, which are filled in.
            display: Shows the end of each job.

        Raises:
            KeyboardInterrupt: After an interrupt, when all trials have ended.
        """
        folder = Path(jobs[0].config.hydra.sweep.dir)
        if jobs[0].number:
            # A sweeper that launches several batches has a folder of Tune's for each.
            folder = folder / f"from_{jobs[0].number}"
        run_trials(
            jobs,
            results,
            display,
            cpus=self.resources.cpus,
            gpus=self.resources.gpus,
            address=self.address,
            folder=folder,
        )
