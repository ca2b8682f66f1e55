"""RunContext: the objects that the parts of one run share."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor

from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy, Transfer
from equipoise.trainer.data.batch_stream import NOTHING, BatchStream
from equipoise.trainer.data.loaders import Loaders, Source
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs

if TYPE_CHECKING:
    from equipoise.trainer.trainer import Trainer

__all__ = ["RunContext"]


@dataclass
class RunContext:
    """The parts of one run.

    Attributes:
        trainer: The trainer, for its options and its state.
        module: The user's module.
        datamodule: The user's data module, if there is one.
        strategy, precision: How the run computes.
        hooks: Who overrides what.
        logs: What was logged.
        sources: Where the loaders of each stage come from.
        fitting: What was learned of the sizes that fit into memory, in training and in evaluations.
    """

    trainer: "Trainer"
    module: LightningModule
    datamodule: LightningDataModule | None
    strategy: Strategy
    precision: Precision
    hooks: Hooks
    logs: Logs
    sources: dict[str, Source] = field(default_factory=dict)
    fitting: dict[str, Any] = field(default_factory=dict)

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
        share = self.trainer.use_distributed_sampler
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
