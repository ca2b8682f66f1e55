"""Runs under each strategy with eight samples in a step, and a program of one that is killed."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from equipoise import FSDPStrategy, PipelineStrategy, Quantization
from tests.extensions.quantization.qlora import QLoRA, tokens
from tests.support.trainer_runs import trainer

_STRATEGIES: dict[str, Any] = {
    "single_device": lambda: {"devices": 1},
    "dp": lambda: {"strategy": "dp", "devices": ["cpu", "cpu"]},
    "ddp": lambda: {"strategy": "ddp", "devices": 2},
    "fsdp": lambda: {"strategy": FSDPStrategy(timeout=120.0), "devices": 2},
    "fsdp, sharded": lambda: {"strategy": FSDPStrategy(timeout=120.0, checkpoints="sharded"), "devices": 2},
    "pipeline": lambda: {"strategy": PipelineStrategy(), "devices": ["cpu", "cpu"]},
    "pipeline, processes": lambda: {"strategy": PipelineStrategy(engine="processes"), "devices": ["cpu", "cpu"]},
}
# The last step before the kill, in the second of three epochs.
KILLED_AFTER = 5


def fit(module: Any, *callbacks: L.Callback, strategy: str = "single_device", path: Any = None, **options: Any) -> Any:
    """Train with eight samples in each of three steps, for all processes together, and return the module.

    Args:
        module: The module.
        callbacks: The callbacks.
        strategy: A strategy on two CPU devices, or "single_device".
        path: A checkpoint with which the training continues.
        options: Further arguments of the trainer, which computes in float64.
    """
    run = trainer(callbacks=list(callbacks), **{"precision": "64-true", **_STRATEGIES[strategy](), **options})
    of_a_process = 4 if strategy.startswith(("ddp", "fsdp")) else 8
    run.fit(module, tokens(of_a_process, 24 // of_a_process), ckpt_path=path)
    return module


def saving(folder: Path) -> ModelCheckpoint:
    """Return a callback that writes a checkpoint after each step."""
    return ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False)


class Kill(L.Callback):
    """Kills all processes of the run at the beginning of a step."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == KILLED_AFTER:
            os.killpg(os.getpgid(0), signal.SIGKILL)


def be_killed() -> None:
    """Train until the kill; arguments are the strategy, the kind of quantisation, and the folder of checkpoints."""
    strategy, kind, folder = sys.argv[1:]
    callbacks = [Quantization(kind), saving(Path(folder)), Kill()]  # type: ignore[arg-type]
    fit(QLoRA(), *callbacks, strategy=strategy, max_epochs=3, enable_checkpointing=True)
