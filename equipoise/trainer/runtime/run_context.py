"""RunContext: the objects that the parts of one run share."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from equipoise.interop.lightning.classes import is_overridden
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy, Transfer
from equipoise.trainer.data.batch_stream import NOTHING, BatchStream
from equipoise.trainer.data.loaders import Loaders, Source
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logger_output import LoggerOutput
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.state.run_state import RunState

__all__ = ["RunContext"]


@dataclass
class RunContext:
    """The parts of one run.

    Attributes:
        state: Settings, stage, counters and objects of the trainer.
        module: The user's module.
        datamodule: The user's data module, if there is one.
        strategy, precision: How the run computes.
        hooks: Who overrides what.
        logs: What was logged.
        logger_output: Hands logged values to the loggers.
        lightning_optimizers: Returns the optimisers as `self.optimizers()` gives them.
        save_checkpoint: The trainer's method, called with a path.
        sources: Where the loaders of each stage come from.
        fitting: What was learned of the sizes that fit into memory, in training and in evaluations.
    """

    state: RunState
    module: LightningModule
    datamodule: LightningDataModule | None
    strategy: Strategy
    precision: Precision
    hooks: Hooks
    logs: Logs
    logger_output: LoggerOutput
    lightning_optimizers: Callable[[], list[LightningOptimizer]]
    save_checkpoint: Callable[[str | os.PathLike[str]], None]
    sources: dict[str, Source] = field(default_factory=dict)
    fitting: dict[str, Any] = field(default_factory=dict)

    @property
    def global_step(self) -> int:
        """Number of optimiser steps done, over all optimisers; it is not reset."""
        return self.state.progress.steps(automatic=self.module.automatic_optimization).completed

    @property
    def enable_validation(self) -> bool:
        """True if a fit validates: there is a loader, a `validation_step`, and no limit of 0."""
        if not self.sources["val"].is_defined():
            return False
        return is_overridden("validation_step", self.module) and self.state.limit_val_batches > 0

    @property
    def validates_in_epoch(self) -> bool:
        """True if a fit validates in the present epoch."""
        if not self.enable_validation:
            return False
        every = self.state.check_val_every_n_epoch
        return every is None or (self.state.current_epoch + 1) % every == 0

    def request_loaders(self, stage: str, limit: float, *, overfit: bool = False) -> Loaders:
        """Asks the source of a stage for its loaders and makes them ready.

        Args:
            stage: "train", "val", "test" or "predict".
            limit: The `limit_*_batches` of the stage.
            overfit: Whether shuffling is to be turned off.
        """
        source, hooks = self.sources[stage], self.hooks
        call = hooks.call_module if source.owner is self.module else hooks.call_datamodule
        given = source.request(call)
        self.strategy.processes.barrier(f"{stage}_dataloader()")
        share = self.state.use_distributed_sampler
        return Loaders(source, given, limit=limit, overfit=overfit, strategy=self.strategy, share=share)

    def make_transfer(self, dataloader_idx: int = 0) -> Transfer:
        """The way of a batch to a device: conversion, the user's transfer hooks, the copy."""
        hooks, convert = self.hooks, self.precision.convert_input
        before = hooks.bind_data("on_before_batch_transfer")
        move = hooks.bind_data("transfer_batch_to_device")
        after = hooks.bind_data("on_after_batch_transfer")
        if convert is None and before is None and move is None and after is None:
            return hooks.profiled(_move, hooks.action_of_strategy("batch_to_device"))

        def transfer(batch: Any, device: torch.device) -> Any:
            if convert is not None:
                batch = convert(batch)
            if before is not None:
                batch = before(batch, dataloader_idx)
            batch = _move(batch, device) if move is None else move(batch, device, dataloader_idx)
            return batch if after is None else after(batch, dataloader_idx)

        return hooks.profiled(transfer, hooks.action_of_strategy("batch_to_device"))

    def batches(self, stream: BatchStream, action: str, seen: int = 0) -> Iterable[Any]:
        """The batches of a stream, the reading of each timed if somebody asked for a profile.

        Args:
            stream: The stream.
            action: The name that the profile gives to the reading of a batch.
            seen: The number of batches that were read before.
        """
        if not self.hooks.is_profiled:
            return stream
        return self._timed_batches(stream, action, seen)

    def _timed_batches(self, stream: BatchStream, action: str, seen: int) -> Iterator[Any]:
        batches = iter(stream)
        while stream.length is None or seen < stream.length:
            with self.profile(action):
                batch = next(batches, NOTHING)
            if batch is NOTHING:
                return
            seen += 1
            yield batch
            del batch

    def forward_context(self) -> Callable[[], AbstractContextManager[Any]] | None:
        """The precision's context around a step; None where there is none."""
        return self.precision.forward_context

    def profile(self, action: str) -> AbstractContextManager[Any]:
        """Times a block, if somebody asked for a profile."""
        return self.hooks.profiler.profile(action) if self.hooks.is_profiled else nullcontext()


def _move(batch: Any, device: torch.device) -> Any:
    """Copies what is not yet on the device; a batch that is there already is returned as it is."""
    cpu = device.type == "cpu"
    for tensor in batch if type(batch) in (tuple, list) else (batch,):
        if type(tensor) is not Tensor or not (tensor.is_cpu if cpu else tensor.device == device):
            return move_data_to_device(batch, device)
    return batch
