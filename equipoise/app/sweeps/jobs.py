"""A job of a sweep: its configuration, and the function that Hydra's sweeper wants to be run with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.utils import JobRuntime, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

__all__ = ["SweepJob"]


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep. It can be sent to another process.

    Attributes:
        number: Number of the job in the sweep, from 0.
        overrides: Its overrides, as on a command line.
        config: Its configuration, Hydra's part included.
        folder: Its folder.
        task: Function to call with the configuration.
        callbacks: Hydra's callbacks.
    """

    number: int
    overrides: Sequence[str]
    config: DictConfig
    folder: Path
    task: TaskFunction
    callbacks: Any

    @classmethod
    def create(
        cls, number: int, overrides: Sequence[str], config: DictConfig, task: TaskFunction, callbacks: Any
    ) -> "SweepJob":
        """Return a job whose folder is known, and whose configuration chooses no launcher any more."""
        # 1. Classes of our own structured configurations are not sent: their values have been checked.
        content: Any = OmegaConf.to_container(config, resolve=False)
        content["launcher"] = None
        del content["hydra"]
        plain = OmegaConf.create(content)
        # 2. Hydra wants its part with its own class. The folder contains the time at which the sweep began.
        entries = {
            "hydra": config.hydra,
            "hydra.job.id": str(number),
            "hydra.job.num": number,
            "hydra.sweep.dir": str(Path(config.hydra.sweep.dir).absolute()),
        }
        for key, value in entries.items():
            OmegaConf.update(plain, key, value)
        OmegaConf.set_struct(plain, True)
        # 3. The name of the job's own folder may contain its number.
        folder = Path(plain.hydra.sweep.dir, str(plain.hydra.sweep.subdir))
        return cls(number, tuple(overrides), plain, folder, task, callbacks)

    def with_trainer(self, arguments: Mapping[str, Any]) -> "SweepJob":
        """Return the job with other arguments of its trainer."""
        config = self.config.copy()
        config.trainer.update(arguments)
        return replace(self, config=config)

    def run(self) -> Any:
        """Run the job in this process, as Hydra runs jobs.

        Returns:
            The value of the task.

        Raises:
            Exception: The error of the task.
        """
        setup_globals()
        JobRuntime.instance().set("name", self.config.hydra.job.name)
        # The loader is not needed any more: the configuration is composed.
        context = HydraContext(config_loader=None, callbacks=self.callbacks)  # type: ignore[arg-type]
        returned = run_job(
            hydra_context=context,
            task_function=self.task,
            config=self.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        return returned.return_value
