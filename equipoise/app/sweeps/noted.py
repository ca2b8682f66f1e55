"""Results of jobs that a launcher of Hydra runs, one after the other in this process or each in one of its own.

    the command            results_of_other_launchers   makes a folder of notes, and reads them when the sweep has ended
    each job, anywhere     noted_job                    leaves a note in that folder

Launchers of the group `launcher` follow their jobs by themselves.
"""

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import cloudpickle
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from equipoise.app.sweeps.objective import objectives_of
from equipoise.app.sweeps.progress import reporting_to
from equipoise.app.sweeps.results import JobResult, SweepResults
from equipoise.parallel.payload.shared_payload import pickle_error

__all__ = ["noted_job", "results_of_other_launchers"]

_OURS = "hydra_plugins.equipoise_launcher."


@contextmanager
def results_of_other_launchers(results: SweepResults) -> Iterator[str]:
    """Add the results of noted jobs at the end of a sweep, however that ends.

    Args:
        results: The results of the sweep.

    Yields:
        The folder of notes.
    """
    with tempfile.TemporaryDirectory(prefix="equipoise-sweep-") as folder:
        try:
            yield folder
        finally:
            notes = [pickle.loads(file.read_bytes()) for file in Path(folder).iterdir()]
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
        raise
    except BaseException:
        job.interrupt()
        raise
    finally:
        with suppress(OSError):
            Path(notes, str(job.number)).write_bytes(cloudpickle.dumps((job, sweep_folder)))
