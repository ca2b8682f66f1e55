"""The trainer under which an evaluation runs: ours, Lightning's, or none."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from equipoise.interop.lightning.classes import is_a, is_overridden
from equipoise.interop.torch.loaders import with_sampler
from equipoise.parallel.batches.dealing import deal_batches
from equipoise.parallel.batches.sampling import UnpaddedDistributedSampler
from equipoise.parallel.batches.shard import Shard
from equipoise.parallel.communication.object_exchange import gather_objects

__all__ = ["EvaluationHost"]


def _gather(value: Any) -> list[Any]:
    if dist.is_initialized():
        return gather_objects(value)
    return [value]


@dataclass(kw_only=True)
class EvaluationHost:
    """Device, processes and precision of an evaluation.

    Attributes:
        device: Device of the batches.
        rank: Number of this process.
        world_size: Number of processes.
        gather: Function that returns the values of all processes, in the order of ranks.
        transfer: Function that moves a batch to the device.
        forward_context: Function that creates the precision's context of forward.
        strategy: Strategy of Equipoise, or None. It distributes data and synchronises buffers.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    gather: Callable[[Any], list[Any]] = _gather
    transfer: Callable[[Any], Any]
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    strategy: Any = field(default=None)

    @classmethod
    def of(cls, trainer: Any, module: nn.Module) -> "EvaluationHost":
        """Describe the host of an evaluation by public names of the trainer.

        Args:
            trainer: Trainer of Equipoise or of Lightning; None: the module is evaluated on its own device.
            module: The module.
        """
        if trainer is None:
            return cls._without_trainer(module)
        strategy = trainer.strategy
        plugin = trainer.precision_plugin
        device = strategy.root_device
        move = _transfer(module, trainer.datamodule, device)
        # Only strategies of Equipoise have this method.
        is_ours = hasattr(strategy, "gather_objects")
        return cls(
            device=device,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            gather=strategy.gather_objects if is_ours else _gather,
            transfer=lambda batch: move(plugin.convert_input(batch)),
            forward_context=plugin.forward_context,
            strategy=strategy if is_ours else None,
        )

    @classmethod
    def _without_trainer(cls, module: nn.Module) -> "EvaluationHost":
        """Describe the module's own device and the process group, if there is one."""
        first = next(chain(module.parameters(), module.buffers()), None)
        device = torch.device("cpu") if first is None else first.device
        transfer = _transfer(module, None, device)
        if not dist.is_initialized():
            return cls(device=device, transfer=transfer)
        return cls(device=device, rank=dist.get_rank(), world_size=dist.get_world_size(), transfer=transfer)

    def shard(self, loader: Any) -> Shard:
        """Return this process's part of a loader: whole batches in turn, none of them twice."""
        if self.world_size == 1:
            return Shard(loader)
        # Torch's sampler repeats samples at the end.
        if isinstance(loader, DataLoader) and type(loader.sampler) is DistributedSampler:
            return self.as_shard(_unpadded(loader, loader.sampler))
        if self.strategy is not None:
            shard: Shard = self.strategy.shard(loader, "validate")
            return shard
        return self.as_shard(self._dealt(loader))

    def as_shard(self, loader: Any) -> Shard:
        """Return a loader as the part of this process."""
        return Shard(loader, self.rank, self.world_size, in_turn=self.strategy is None)

    def _dealt(self, loader: Any) -> Any:
        """Return the batches of a loader that are dealt to this process."""
        makes_batches = isinstance(loader, DataLoader) and loader.batch_sampler is not None
        if makes_batches and isinstance(loader.sampler, DistributedSampler):
            # The user has distributed the samples.
            return loader
        return deal_batches(loader, self.rank, self.world_size)

    def num_batches(self, batches: int | None, shard: Shard) -> int | None:
        """Return the number of batches that this process evaluates; None: all.

        Args:
            batches: Number of batches of all processes together; None: all.
            shard: This process's part of the loader.
        """
        if batches is None:
            return None
        num_batches = shard.num_batches(batches)
        if num_batches is None:
            return batches
        return int(num_batches)

    def share_buffers(self, module: nn.Module) -> None:
        """Copy the buffers of the main process to all processes.

        In training, each process has different statistics of BatchNorm.
        """
        if self.strategy is not None:
            self.strategy.sync_buffers()
        elif self.world_size > 1:
            with torch.no_grad():
                for buffer in module.buffers():
                    # Broadcasts need contiguous memory.
                    values = buffer.detach().clone(memory_format=torch.contiguous_format)
                    dist.broadcast(values, 0)
                    buffer.copy_(values)


def _unpadded(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> DataLoader[Any]:
    """Return a copy of a loader whose distributed sampler repeats no samples at the end."""
    # Nothing is padded, or the sampler does not make the batches.
    if sampler.drop_last or loader.batch_size is None:
        return loader
    unpadded = UnpaddedDistributedSampler(
        sampler.dataset, sampler.num_replicas, sampler.rank, shuffle=sampler.shuffle, seed=sampler.seed
    )
    unpadded.set_epoch(sampler.epoch)
    return with_sampler(loader, unpadded)


def _transfer(module: nn.Module, datamodule: Any, device: torch.device) -> Callable[[Any], Any]:
    """Return a function that moves a batch to the device by the user's hooks.

    Hooks of the data module come before those of the module.
    """
    if not is_a(module, LightningModule):
        return lambda batch: move_data_to_device(batch, device)

    def owner_of(hook: str) -> Any:
        if datamodule is not None and is_overridden(hook, datamodule):
            return datamodule
        return module

    before = owner_of("on_before_batch_transfer").on_before_batch_transfer
    move = owner_of("transfer_batch_to_device").transfer_batch_to_device
    after = owner_of("on_after_batch_transfer").on_after_batch_transfer

    def transfer(batch: Any) -> Any:
        batch = before(batch, 0)
        batch = move(batch, device, 0)
        return after(batch, 0)

    return transfer
