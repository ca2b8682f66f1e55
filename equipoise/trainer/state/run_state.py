"""RunState: settings, stage, counters and objects of a trainer's runs, in plain data.

The trainer owns one and offers its fields under Lightning's names. Loops and all other parts of a run read and write
this object, and never the trainer.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from equipoise.trainer.settings.limits import Limits
from equipoise.trainer.settings.step_choices import StepChoices
from equipoise.trainer.state.progress import FitProgress
from equipoise.trainer.state.sent_state import LOCAL, LOCAL_RESULT, RESULT, SentState
from equipoise.trainer.state.stages import Stages

__all__ = ["MetricListener", "RunState"]

# Called with the trainer, the values by name, and the number of optimiser steps done before the present one.
MetricListener = Callable[[Any, dict[str, Any], int], None]


@dataclass(eq=False)
class RunState(SentState, Stages, Limits, StepChoices):
    """The state of a trainer, from its constructor on; a second run continues with it.

    Limits, choices about steps, and settings without a text here, are the checked arguments of the Trainer
    of the same names.

    Attributes:
        root_dir: The folder of files for which the user names no folder, as it was passed.
        checkpoint_io: The user's CheckpointIO; None: files are written and read by ourselves.
        requeues_on_signal: Whether SIGUSR1 in a job of Slurm puts the job into the queue again.
        stop_requests: Who has asked training to stop: the keys of callbacks that stop early, which may change their
            minds until the minimum is met; "" for everyone else.
        received_sigterm: True if a SIGTERM came, or a SIGUSR1 in a job of Slurm.
        requeues: True if Slurm puts this job into the queue again when it ends, since SIGUSR1 came.
        number_of_fit: The number of this fit, from 1, among those in its folder; counted in a job of Slurm.
        progress: All counters of training.
        loaded_ckpt_path: The checkpoint that the last run has loaded.
        managed_ckpt_path: The checkpoint that the user has set for the runs that follow.
        objects_were_reported: True if a warning named the objects in the checkpoints, which are not read again.
        datamodule: The user's data module, if there is one.
        callbacks: The callbacks, in the order in which they are called.
        loggers: The loggers, in the order in which they are called.
        metric_listeners: Functions that receive the values that go to loggers, also if there is no logger.
        optimizers: The optimisers that `configure_optimizers` returned.
        lr_scheduler_configs: The learning-rate schedulers that `configure_optimizers` returned.
        summary_rows: Rows that parts of the present run add to its summary: values by their names.
    """

    # Settings of the optimisation.
    accumulate_grad_batches: int = 1
    gradient_clip_val: int | float | None = None
    gradient_clip_algorithm: str | None = None
    sync_batchnorm: bool = False

    # Settings of data and evaluation.
    use_distributed_sampler: bool = True
    reload_dataloaders_every_n_epochs: int = 0
    inference_mode: bool = True

    # Settings of logging, diagnostics and files.
    log_every_n_steps: int = 50
    enable_autolog_hparams: bool = True
    detect_anomaly: bool = False
    detect_nonfinite: bool | None = None
    barebones: bool = False
    num_nodes: int = 1
    root_dir: str = field(default_factory=os.getcwd)
    profiler: Profiler = field(default_factory=PassThroughProfiler)
    checkpoint_io: CheckpointIO | None = None
    requeues_on_signal: bool = True

    # Requests to end.
    stop_requests: set[str] = field(default_factory=set, metadata=RESULT)
    received_sigterm: bool = field(default=False, metadata=RESULT)
    requeues: bool = False

    # Counters and checkpoints.
    number_of_fit: int = 1
    progress: FitProgress = field(default_factory=FitProgress, metadata=RESULT)
    loaded_ckpt_path: Any = field(default=None, metadata=RESULT)
    managed_ckpt_path: Any = field(default=None, metadata=RESULT)
    objects_were_reported: bool = False

    # Objects that a run calls.
    datamodule: LightningDataModule | None = None
    callbacks: list[Callback] = field(default_factory=list)
    loggers: list[Logger] = field(default_factory=list)
    metric_listeners: list[MetricListener] = field(default_factory=list, metadata=LOCAL)
    optimizers: list[Optimizer] = field(default_factory=list, metadata=LOCAL_RESULT)
    lr_scheduler_configs: list[LRSchedulerConfig] = field(default_factory=list, metadata=LOCAL_RESULT)
    summary_rows: dict[str, str] = field(default_factory=dict)

    def begin(self, fn: TrainerFn) -> None:
        """Begin a run of an entry point."""
        super().begin(fn)
        self.stop_requests.clear()
        self.summary_rows = {}

    # Requests to end.

    @property
    def should_stop(self) -> bool:
        """Set it, and training ends after the batch, as soon as `min_epochs` and `min_steps` are met."""
        return bool(self.stop_requests)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.stop_requests.add("")
        else:
            self.stop_requests.clear()

    def forget_signals(self) -> None:
        """Forget the signals of an earlier run."""
        self.received_sigterm = False
        self.requeues = False

    def note_signal(self, *, requeues: bool) -> None:
        """Note a signal, upon which the loops end after the batch.

        Args:
            requeues: Whether Slurm puts the job into the queue again.
        """
        self.requeues = self.requeues or requeues
        self.received_sigterm = True

    # Values that are computed.

    @property
    def current_epoch(self) -> int:
        """Number of epochs done."""
        return self.progress.epoch.current.completed

    @property
    def is_validation_epoch(self) -> bool:
        """True if a fit that validates does so in the present epoch."""
        every = self.check_val_every_n_epoch
        return every is None or (self.current_epoch + 1) % every == 0

    @property
    def default_root_dir(self) -> str:
        """Folder of files for which the user names no folder."""
        # An address such as "s3://bucket" is no path of this machine.
        if "://" in self.root_dir:
            return self.root_dir
        return os.path.normpath(os.path.expanduser(self.root_dir))
