"""Runs under each strategy with eight samples in a step."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from equipoise import FSDPStrategy, PipelineStrategy
from tests.extensions.quantization.qlora import tokens
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
