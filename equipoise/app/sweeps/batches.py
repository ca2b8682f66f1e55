"""Batches of jobs, as Hydra's sweepers launch them: composed here, and run by the chosen launcher."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from equipoise.app.sweeps.collection import current_results
from equipoise.app.sweeps.jobs import SweepJob
from equipoise.app.sweeps.objective import objectives_of, reads_values
from equipoise.app.sweeps.results import JobResult, JobState, SweepResults
from equipoise.app.sweeps.tables import SweepDisplay, print_closing_table
from equipoise.errors import ConfigurationError

__all__ = ["JobBatches", "JobRunner", "launcher_of"]


class JobRunner(Protocol):
    """A launcher of the group `launcher`."""

    def check_sweep(self, config: DictConfig) -> None:
        """Check a job's configuration before the first job starts."""

    def run_jobs(self, jobs: Sequence[SweepJob], results: Sequence[JobResult], display: SweepDisplay) -> None:
        """Run jobs and fill in their results, of those that end; an error of a job is one of its results."""


def launcher_of(config: DictConfig) -> JobRunner:
    """Return the launcher that a sweep has chosen.

    Raises:
        ConfigurationError: If an option of the launcher is wrong.
    """
    # Hydra would wrap the error of the constructor.
    constructor = instantiate(config.launcher, _partial_=True, _convert_="all")
    launcher: JobRunner = constructor()
    return launcher


class JobBatches:
    """Runs jobs of a sweep by the launcher that the group `launcher` has chosen.

    Args:
        context: Hydra's context, with which jobs are composed.
        task: Function to call with the configuration of each job.
        config: Configuration of the sweep.

    Raises:
        ConfigurationError: If no launcher is chosen.
    """

    def __init__(self, context: HydraContext, task: TaskFunction, config: DictConfig) -> None:
        if not config.get("launcher"):
            raise ConfigurationError("hydra/launcher=equipoise is chosen by launcher=pool or launcher=ray.")
        self._context = context
        self._task = task
        self._config = config
        self._launcher = launcher_of(config)

    def run(self, job_overrides: Sequence[Sequence[str]], first_number: int) -> list[JobReturn]:
        """Run a batch of jobs.

        Args:
            job_overrides: Overrides of each job.
            first_number: Number of the first job.

        Returns:
            Configuration and value of each job.
        """
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)

        # 1. The jobs and their results.
        jobs = []
        batch = []
        for number, overrides in enumerate(job_overrides, start=first_number):
            job = self._compose(number, overrides)
            jobs.append(job)
            batch.append(JobResult(number, job.overrides, job.folder, objectives_of(job.config)))

        # 2. Run them. An interrupt leaves the results so far.
        folder = Path(jobs[0].config.hydra.sweep.dir)
        collected = current_results()
        results = collected or SweepResults()
        results.add(batch, folder)
        display = SweepDisplay(results)
        try:
            with display.shown():
                self._launcher.run_jobs(jobs, batch, display)
        finally:
            # An interrupt or an error leaves jobs without an end.
            for result in batch:
                if not result.has_ended:
                    result.interrupt()
            results.write()
            if collected is None:
                print_closing_table(results)
        return [self._returned(job, result, collected) for job, result in zip(jobs, batch, strict=True)]

    def _compose(self, number: int, overrides: Sequence[str]) -> SweepJob:
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        return SweepJob.create(number, overrides, config, self._task, self._context.callbacks)

    def _returned(self, job: SweepJob, result: JobResult, collected: SweepResults | None) -> JobReturn:
        """Return a result as Hydra's sweepers take it."""
        config = job.config.copy()
        OmegaConf.set_struct(config, False)
        hydra_config = OmegaConf.create({"hydra": config.pop("hydra")})
        # Hydra's own sweeper would leave out all further batches after a failure.
        status = JobStatus.COMPLETED
        value = result.value
        if result.state is not JobState.DONE:
            value = result.error
            if collected is not None and not reads_values(self._config.hydra.sweeper):
                collected.keep_failure(result)
            else:
                status = JobStatus.FAILED
        returned = JobReturn(
            overrides=list(job.overrides),
            cfg=config,
            hydra_cfg=hydra_config,
            working_dir=str(job.folder),
            task_name=hydra_config.hydra.job.name,
            status=status,
        )
        returned.return_value = value
        return returned
