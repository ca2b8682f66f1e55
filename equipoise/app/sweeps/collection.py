"""The results of a whole sweep, whose sweeper may launch its jobs in several batches, by any launcher.

Launchers of the group `launcher` follow their jobs by themselves. Other launchers of Hydra run jobs one after the other
in this process, or in processes of their own: there each job leaves a note of its result in a folder.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import cloudpickle
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from equipoise.app.sweeps.objective import objectives_of, reads_values
from equipoise.app.sweeps.progress import reporting_to
from equipoise.app.sweeps.results import JobResult, SweepResults
from equipoise.app.sweeps.tables import print_closing_table
from equipoise.parallel.payload.object_bytes import pickle_error

__all__ = ["collected_results", "current_results", "noted_job", "results_of_other_launchers", "runs_in_turn"]

# Where the plugin is that follows its jobs.
_OURS = "hydra_plugins.equipoise_launcher."
# Results that a program collects over several launches of a sweeper.
_collecting: list[SweepResults] = []


@contextmanager
def collected_results() -> Iterator[SweepResults]:
    """Collect the results of all jobs of a block; at its end, show them in one table and raise failures.

    Raises:
        SweepError: If jobs have failed, and no sweeper knows of it.
    """
    results = SweepResults()
    _collecting.append(results)
    try:
        yield results
    finally:
        _collecting.remove(results)
        if results.jobs:
            print_closing_table(results)
    results.raise_failures()


def current_results() -> SweepResults | None:
    """Return the results that the program collects; None if it does not, as a `hydra.main` of the user's own."""
    if not _collecting:
        return None
    return _collecting[-1]


@contextmanager
def results_of_other_launchers(results: SweepResults) -> Iterator[str]:
    """Add the results of noted jobs at the end of a sweep, however that ends.

    Yields:
        The folder of notes.
    """
    with tempfile.TemporaryDirectory(prefix="equipoise-sweep-") as folder:
        try:
            yield folder
        finally:
            notes = [cloudpickle.loads(file.read_bytes()) for file in Path(folder).iterdir()]
            for job, sweep_folder in sorted(notes, key=lambda note: note[0].number):
                results.add([job], sweep_folder)


@contextmanager
def noted_job(config: DictConfig, notes: str) -> Iterator[None]:
    """Run a job of a sweep in a block, and leave a note of its result.

    Args:
        config: The configuration of the job.
        notes: The folder of notes. On another machine it may be missing; the sweep then has no table.
    """
    hydra_config = HydraConfig.get()
    if str(hydra_config.launcher["_target_"]).startswith(_OURS):
        yield
        return
    sweep_folder = Path(hydra_config.sweep.dir).absolute()
    folder = sweep_folder / str(hydra_config.sweep.subdir)
    overrides = tuple(hydra_config.overrides.task)
    job = JobResult(int(hydra_config.job.num), overrides, folder, objectives_of(config))
    job.begin()
    try:
        with reporting_to(job.note):
            yield
        job.finish(None)
    except Exception as error:
        can_be_sent = pickle_error(error) is not None
        job.fail(error if can_be_sent else RuntimeError(str(error)))
        error.add_note(f"In job {job.number}: {' '.join(overrides)}.")
        raise
    except BaseException:
        job.interrupt()
        raise
    finally:
        with suppress(OSError):
            Path(notes, str(job.number)).write_bytes(cloudpickle.dumps((job, sweep_folder)))


def runs_in_turn() -> bool:
    """Return True if the jobs of this sweep run in this process, one after the other, whatever the others return."""
    hydra_config = HydraConfig.get()
    return hydra_config.runtime.choices["hydra/launcher"] == "basic" and not reads_values(hydra_config.sweeper)
