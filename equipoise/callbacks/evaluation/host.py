"""The trainer under which an evaluation runs: ours, Lightning's, or none."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import base_of, is_a, is_overridden
from equipoise.interop.torch.loaders import with_sampler
from equipoise.parallel.batches.sampling import BatchesInTurn, SameOrder, UnpaddedDistributedSampler
from equipoise.parallel.communication.object_exchange import gather_objects

__all__ = ["EvaluationHost", "find_loader"]


def _gather(value: Any) -> list[Any]:
    return gather_objects(value) if dist.is_initialized() else [value]


@dataclass(kw_only=True)
class EvaluationHost:
    """Where an evaluation runs.

    Attributes:
        device: Where batches are needed.
        rank: The number of this process.
        world_size: The number of processes.
        gather: Returns what all processes pass to it.
        transfer: Brings a batch to the device.
        forward_context: Makes the precision's context of forward.
        strategy: Ours, if it is one; it deals out data and makes buffers the same.
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
        """Asks a trainer, by public names alone.

        Args:
            trainer: Ours or Lightning's; None: the module is evaluated where it lies.
            module: The module.
        """
        if trainer is None:
            device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
            rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            return cls(device=device, rank=rank, world_size=size, transfer=_transfer(module, None, device))
        strategy, plugin = trainer.strategy, trainer.precision_plugin
        device, move = strategy.root_device, _transfer(module, trainer.datamodule, strategy.root_device)
        ours = hasattr(strategy, "gather_objects")
        return cls(
            device=device,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            gather=strategy.gather_objects if ours else _gather,
            transfer=lambda batch: move(plugin.convert_input(batch)),
            forward_context=plugin.forward_context,
            strategy=strategy if ours else None,
        )

    def share(self, loader: Any) -> Any:
        """This process's part of a loader: whole batches in turn, none of them twice."""
        if self.world_size == 1:
            return loader
        if isinstance(loader, DataLoader) and type(loader.sampler) is DistributedSampler:
            return _unpadded(loader, loader.sampler)
        if self.strategy is not None:
            return self.strategy.shard(loader, "validate")
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            return _InTurn(loader, self.rank, self.world_size)
        if isinstance(loader.sampler, DistributedSampler):
            return loader  # the user's own
        if isinstance(loader.dataset, IterableDataset):
            return _InTurn(loader, self.rank, self.world_size)
        batches = BatchesInTurn(SameOrder(loader.batch_sampler), self.rank, self.world_size)
        return with_sampler(loader, batches, batches=True)

    def part_of(self, batches: int | None, part: Any) -> int | None:
        """How many batches of its part this process evaluates, of so many that all together do; None: all there are."""
        if batches is None or self.world_size == 1:
            return batches
        if self.strategy is not None:
            own = self.strategy.part_of(batches, part)
            return batches if own is None else int(own)
        return len(range(self.rank, batches, self.world_size))

    def share_buffers(self, module: nn.Module) -> None:
        """Gives all processes the first one's buffers: statistics of BatchNorm are each process's own in training."""
        if self.strategy is not None:
            self.strategy.begin_evaluation()
        elif self.world_size > 1:
            with torch.no_grad():
                for buffer in module.buffers():
                    same = buffer.detach().clone(memory_format=torch.contiguous_format)
                    dist.broadcast(same, 0)
                    buffer.copy_(same)


def _unpadded(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> DataLoader[Any]:
    """A copy of a loader with torch's own sampler for processes, whose last samples are not given twice."""
    if sampler.drop_last or loader.batch_size is None:  # nothing is padded, or batches are not made from it
        return loader
    shuffle, seed, replicas = sampler.shuffle, sampler.seed, sampler.num_replicas
    own = UnpaddedDistributedSampler(sampler.dataset, replicas, sampler.rank, shuffle=shuffle, seed=seed)
    own.set_epoch(sampler.epoch)
    return with_sampler(loader, own)


def _transfer(module: nn.Module, datamodule: Any, device: torch.device) -> Callable[[Any], Any]:
    """The way of a batch to the device, with the user's hooks: the data module's if it has any, else the module's."""
    if not is_a(module, LightningModule):
        return lambda batch: move_data_to_device(batch, device)

    def owner(hook: str) -> Any:
        return datamodule if datamodule is not None and is_overridden(hook, datamodule) else module

    before = owner("on_before_batch_transfer").on_before_batch_transfer
    move = owner("transfer_batch_to_device").transfer_batch_to_device
    after = owner("on_after_batch_transfer").on_after_batch_transfer
    return lambda batch: after(move(before(batch, 0), device, 0), 0)


class _InTurn:
    """Every so many batches of something that gives the same ones in all processes."""

    def __init__(self, loader: Any, rank: int, count: int) -> None:
        self.loader, self.rank, self.processes = loader, rank, count

    def __iter__(self) -> Any:
        return islice(iter(self.loader), self.rank, None, self.processes)


def find_loader(given: Any, module: nn.Module, trainer: Any) -> Iterable[Any]:
    """The loader that was given: itself, what a function returns, or what a method of that name returns.

    Args:
        given: What the user gave.
        module: The module.
        trainer: The trainer, if there is one.

    Raises:
        ConfigurationError: If there is none, or one that can be read only once.
    """
    told = "dataloader"
    if isinstance(given, str):
        owners = [owner for owner in (getattr(trainer, "datamodule", None), module) if owner is not None]
        made = (getattr(owner, given)() for owner in owners if _defines(owner, given))
        loader = next((each for each in made if each is not None and each != []), None)
        told = f"dataloader={given!r}"
        if loader is None:
            names = " and ".join(type(owner).__name__ for owner in owners)
            raise ConfigurationError(
                f"{told} names a method that returns a loader, but {names} have none of that name, or it returns none."
                " Define it, or give the loader itself."
            )
    elif callable(given) and not isinstance(given, DataLoader):
        told, loader = "The function given as dataloader", given()
    else:
        loader = given
    _check_loader(loader, told)
    return loader  # type: ignore[no-any-return]


def _defines(owner: Any, name: str) -> bool:
    """Whether something has a method of its own by that name; that of a base class of Lightning only raises."""
    base = base_of(owner, LightningModule if is_a(owner, LightningModule) else LightningDataModule)
    return callable(getattr(owner, name, None)) and getattr(type(owner), name, None) is not getattr(base, name, None)


def _check_loader(loader: Any, told: str) -> None:
    several = isinstance(loader, dict) or (
        isinstance(loader, (list, tuple)) and any(isinstance(each, DataLoader) for each in loader)
    )
    if several:
        raise ConfigurationError(
            f"{told} must be one loader, not a {type(loader).__name__} of them. Take a NoGradEvaluation for each, under"
            " names of their own."
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ConfigurationError(f"{told} must give a loader, that is, an iterable of batches; it is {loader!r}.")
    if hasattr(loader, "__next__"):
        raise ConfigurationError(
            f"{told} is a {type(loader).__name__}, which can be read only once. Give a DataLoader, a list, or a class"
            " with `__iter__`."
        )
