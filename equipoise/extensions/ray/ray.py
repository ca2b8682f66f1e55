"""A trainer inside Ray Train and Ray Tune: a callback that reports, and the checkpoint from which a run continues.

from equipoise import Trainer
from equipoise.extensions.ray.ray import RayReport

def loop(config):                              # for ray.train.torch.TorchTrainer(loop, ...)
    trainer = Trainer(max_epochs=10, callbacks=[RayReport(every_n_train_steps=500)])
    trainer.fit(Net(), loader, ckpt_path="last")
"""

import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from equipoise.callbacks.callback import Callback
from equipoise.errors import ConfigurationError
from equipoise.parallel.ray_context import CHECKPOINT_FILE, is_in_ray, last_reported_checkpoint, ray_train
from equipoise.validation import check_whole

__all__ = ["RayReport", "last_checkpoint"]


def last_checkpoint() -> str | None:
    """Return the path of the checkpoint that was reported to Ray last; None before the first, and outside of Ray.

    `fit(..., ckpt_path="last")` asks this by itself. Checkpoints of Ray's own callback for Lightning count as well.

    Example:
        >>> last_checkpoint() is None
        True
    """
    return last_reported_checkpoint()


class RayReport(Callback):
    """Reports metrics and checkpoints to Ray Train or Ray Tune, at the end of each epoch and at an interval of steps.

    The metrics are `trainer.callback_metrics`, with "epoch" and "step". In Ray Train all workers report, as Ray waits
    for all of them; the first one alone writes the file and hands it over. With `FailureConfig(max_failures=...)` Ray
    starts the workers anew after a failure, and `fit(..., ckpt_path="last")` resumes from the last report.

    Args:
        every_n_train_steps: Number of optimiser steps from one report to the next within an epoch. Default: None,
            reports at the end of each epoch alone.
        save_checkpoints: Whether a report has a checkpoint. Default: True.

    Raises:
        ConfigurationError: If the number is not positive, or a run begins outside of Ray.

    Example:
        >>> from equipoise import Trainer
        >>> trainer = Trainer(callbacks=[RayReport(every_n_train_steps=500)], logger=False)
    """

    # Ray waits for the report of every worker, also of one that has no batch in a step.
    fires_without_batch = True
    # It must be called in a process that Ray has started.
    reports_to_ray = True
    uses_outputs = False

    def __init__(self, every_n_train_steps: int | None = None, *, save_checkpoints: bool = True) -> None:
        check_whole("every_n_train_steps", every_n_train_steps, least=1, optional=True)
        self.every_n_train_steps = every_n_train_steps
        self.save_checkpoints = save_checkpoints
        # Step of the last report, since a step may have several batches.
        self._reported_step = -1

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check that a session of Ray receives the reports."""
        if not is_in_ray():
            raise ConfigurationError(
                "RayReport reports to Ray, but this process is neither a worker of Ray Train nor a trial of Ray Tune."
                " Leave it out, or start the program by a TorchTrainer or a Tuner."
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the step from which a resumed run continues: it has been reported."""
        self._reported_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report at the interval of steps."""
        step = trainer.global_step
        if self.every_n_train_steps is None or step == self._reported_step:
            return
        if step % self.every_n_train_steps == 0:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the values of the epoch."""
        self._report(trainer)

    def _report(self, trainer: Any) -> None:
        self._reported_step = trainer.global_step
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics["epoch"] = trainer.current_epoch
        metrics["step"] = trainer.global_step
        if not self.save_checkpoints:
            _hand_over(metrics, None)
            return
        # All processes save, since a state may lie in several of them; the first writes the file.
        folder = Path(tempfile.mkdtemp(prefix="equipoise-ray-"))
        try:
            trainer.save_checkpoint(folder / CHECKPOINT_FILE)
            folders = trainer.strategy.portable.folders
            if folders is not None:
                folders.finish()
            _hand_over(metrics, folder if trainer.is_global_zero else None)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _hand_over(metrics: dict[str, float], folder: Path | None) -> None:
    """Report to Ray, which copies the folder before this returns.

    Args:
        metrics: The values.
        folder: Folder with a checkpoint; None without one.
    """
    module = ray_train()
    if module is None:
        module = import_module("ray.tune")
    checkpoint = None
    if folder is not None:
        checkpoint = module.Checkpoint.from_directory(str(folder))
    module.report(metrics, checkpoint=checkpoint)
