"""The plugin by which Hydra launches jobs on devices of a pool or as trials of Ray Tune.

Hydra builds launchers of this namespace package alone, and imports every module in it in every program that uses Hydra.
So this one imports nothing of Equipoise before a sweep has chosen it.
"""

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

__all__ = ["EquipoiseLauncher"]


class EquipoiseLauncher(Launcher):
    """Launches the jobs of a sweep by the launcher that the group `launcher` has chosen."""

    def __init__(self) -> None:
        self._batches: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Begin a sweep; Hydra calls this once."""
        from equipoise.app.sweeps.batches import JobBatches

        self._batches = JobBatches(hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch of jobs; a sweeper that chooses jobs by the results of others calls this repeatedly.

        Args:
            job_overrides: Overrides of each job.
            initial_job_idx: Number of the first job.

        Returns:
            Configuration and value of each job.
        """
        returned: Sequence[JobReturn] = self._batches.run(job_overrides, initial_job_idx)
        return returned
