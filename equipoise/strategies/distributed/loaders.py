"""Loaders of strategies with several processes: the part of each process."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from equipoise.errors import ConfigurationError, StepError
from equipoise.interop.torch.loaders import with_dataset, with_sampler
from equipoise.parallel.batches.dealing import Turns, deal_batches, is_dealt
from equipoise.parallel.batches.sampling import (
    NO_BATCH,
    BatchesInTurn,
    Collate,
    FirstBatches,
    SameOrder,
    SharedBatches,
    UnpaddedDistributedSampler,
    seed_of_order,
)
from equipoise.parallel.batches.shard import Shard, count_of_rank
from equipoise.parallel.batches.whole_steps import DealtSteps, WholeSteps, deal_of
from equipoise.parallel.communication.processes import Processes

__all__ = [
    "Sizes",
    "has_distributed_sampler",
    "order_of_processes",
    "refuse_missing_batch",
    "refuse_missing_batch_by_hand",
    "refuse_unequal_numbers",
    "shard_of_process",
    "share_loader",
    "step_size_of",
    "why_not_by_shares",
]

# Return the samples of each process, from the number of samples of a step and the number of the step in its epoch.
Sizes = Callable[[int, int], list[int]]


def shard_of_process(loader: Any, stage: str, processes: Processes, sizes_for: Callable[[Any], Sizes | None]) -> Shard:
    """Return one process's part of a loader.

    Args:
        loader: The loader, the same in all processes.
        stage: "train", "validate", "test" or "predict".
        processes: The processes that share the loader.
        sizes_for: Function that returns how the steps of a training loader are divided; see `share_loader`.
    """
    if processes.world_size == 1:
        return Shard(loader)
    seed = seed_of_order()
    training = stage == "train"
    # Shares of samples are for training. Evaluations deal whole batches in turn.
    sizes = None
    if training:
        sizes = sizes_for(loader)
    rank = processes.rank
    part = share_loader(loader, rank, processes.world_size, seed, training=training, sizes=sizes)
    return Shard(part, rank, processes.world_size, in_turn=is_dealt(part))


def share_loader(loader: Any, rank: int, count: int, seed: int, *, training: bool, sizes: Sizes | None = None) -> Any:
    """Return one process's part of a loader.

    Args:
        loader: The loader, the same in all processes.
        rank: The rank of the process.
        count: The number of processes.
        seed: The seed of the order of samples, the same in all processes.
        training: Whether samples are shared out, in another order in each epoch. False: batches are dealt in turn.
        sizes: Function that returns the samples of each process in a step, from the number of samples of the step and
            the number of the step in its epoch. None: even shares.

    Raises:
        ConfigurationError: If the loader does not show which samples belong to which process.
    """
    if training and sizes is not None:
        reason = why_not_by_shares(loader)
        if reason:
            raise ConfigurationError(f"shares need a DataLoader with a batch_size to cut, {reason}. Leave them out.")
    if not isinstance(loader, DataLoader):
        return Turns(loader, rank, count)
    if isinstance(loader.dataset, IterableDataset):
        return _share_stream(loader, rank, count)
    if has_distributed_sampler(loader):
        return loader
    if training:
        return _share_training_batches(loader, rank, count, seed, sizes)
    return deal_batches(loader, rank, count)


def why_not_by_shares(loader: Any) -> str:
    """Return why the samples of a loader's steps cannot be shared out unevenly; empty if they can."""
    if _has_whole_steps(loader):
        return ""
    if not (isinstance(loader, DataLoader) and loader.batch_size):
        return f"which this {type(loader).__name__} has not"
    if isinstance(loader.dataset, IterableDataset):
        return f"but {type(loader.dataset).__name__} is an IterableDataset, which shares itself out"
    if has_distributed_sampler(loader):
        return f"but its {type(loader.sampler).__name__} shares the samples out already"
    return ""


def step_size_of(loader: Any, count: int) -> int | None:
    """Return the number of samples in a full step of all processes; None if it is unknown."""
    if _has_whole_steps(loader):
        size: int | None = loader.batch_sampler.size
        return size
    batch_size = getattr(loader, "batch_size", None)
    if not batch_size:
        return None
    return int(batch_size) * count


def _has_whole_steps(loader: Any) -> bool:
    """Return whether the batches of a loader are steps, which several processes divide."""
    return isinstance(getattr(loader, "batch_sampler", None), WholeSteps)


def refuse_missing_batch(batch: Any, *, shares_statistics: bool) -> None:
    """Check that a process can go without a batch.

    Args:
        batch: The item of a loader.
        shares_statistics: Whether layers of the module compute over the samples of all processes.

    Raises:
        StepError: If the batch is missing and others wait for it, or if only one of several loaders has none.
    """
    if batch is NO_BATCH and shares_statistics:
        raise StepError(
            "This process has no batch in a step while others have, but sync_batchnorm=True computes over all"
            " of them. Take DataLoader(drop_last=True), or numbers of samples that leave some for each."
        )
    if isinstance(batch, dict):
        members: Any = batch.values()
    elif isinstance(batch, (list, tuple)):
        members = batch
    else:
        return
    for member in members:
        if member is NO_BATCH:
            raise StepError(
                "One of several loaders has no batch for this process in this step, while others have. Take numbers of"
                " samples that the processes share evenly, or DataLoader(drop_last=True)."
            )


def refuse_missing_batch_by_hand() -> NoReturn:
    """Refuse a step of manual optimisation in which this process has no batch, while others have.

    Raises:
        StepError: In any case.
    """
    raise StepError(
        "Some processes have no batch in this step, but the module optimises by hand, where only its step knows"
        " how often gradients are exchanged. Take a number of samples that all processes share evenly, or"
        " DataLoader(drop_last=True)."
    )


def refuse_unequal_numbers(numbers: Sequence[float], *, by_hand: bool, shares_statistics: bool) -> None:
    """Check that all processes have a batch in every step where each needs one.

    Args:
        numbers: Number of batches of each process in an epoch.
        by_hand: Whether gradients are exchanged in steps that the module optimises by hand.
        shares_statistics: Whether layers of the module compute over the samples of all processes.

    Raises:
        ConfigurationError: If they have unequal numbers.
    """
    if len(set(numbers)) == 1 or not (by_hand or shares_statistics):
        return
    reason = "the module optimises by hand" if by_hand else "sync_batchnorm=True computes over all of them"
    raise ConfigurationError(
        f"The processes have {' and '.join(map(str, numbers))} batches in an epoch, but {reason}, so each needs a batch"
        " in every step. Take a number of samples that they share evenly, DataLoader(drop_last=True), or"
        f" limit_train_batches={min(numbers)}."
    )


def has_distributed_sampler(loader: DataLoader[Any]) -> bool:
    """Return whether the user's own sampler shares out the samples."""
    if isinstance(loader.sampler, UnpaddedDistributedSampler):
        return False
    return isinstance(loader.sampler, DistributedSampler)


def _share_training_batches(loader: DataLoader[Any], rank: int, count: int, seed: int, sizes: Sizes | None) -> Any:
    """Return one process's part of a training loader over a data set of known length."""
    batches: Any = loader.batch_sampler
    divide = sizes or partial(_dealt_sizes, processes=count)
    # 1. Every sample is a batch.
    if batches is None:
        same_order = with_sampler(loader, SameOrder(loader.sampler, seed))
        return Turns(same_order, rank, count)
    # 2. Every batch is a step already, as in a run that began with another number of processes.
    if isinstance(batches, WholeSteps):
        if batches.deal is not None and sizes is None:
            return _with_batches(loader, DealtSteps(batches.batch_sampler, batches.deal, rank, count, batches.joined))
        return _with_batches(loader, SharedBatches(batches, divide, rank))
    # 3. The user's own batch sampler decides which samples make a batch.
    if loader.batch_size is None:
        order = SameOrder(batches, seed)
        deal = deal_of(batches)
        if deal is not None:
            return _with_batches(loader, DealtSteps(order, deal, rank, count))
        return with_sampler(loader, BatchesInTurn(order, rank, count), batches=True)
    # 4. Samples make batches, and those of all processes a step.
    if sizes is None and _order_for_all(loader, seed) is None:
        return _share_evenly(loader, rank, count, seed)
    steps = BatchSampler(order_of_processes(loader, seed), loader.batch_size * count, loader.drop_last)
    return _with_batches(loader, SharedBatches(steps, divide, rank))


def order_of_processes(loader: DataLoader[Any], seed: int) -> Any:
    """Return a sampler over the samples of all processes, in the order in which they share them out."""
    order = _order_for_all(loader, seed)
    if order is not None:
        return order
    return UnpaddedDistributedSampler(loader.dataset, 1, 0, shuffle=_shuffles(loader), seed=seed)


def _shuffles(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.sampler, RandomSampler)


def _order_for_all(loader: DataLoader[Any], seed: int) -> SameOrder | None:
    """Return the loader's sampler with one order in all processes; None if every sample is drawn once an epoch."""
    sampler = loader.sampler
    if isinstance(sampler, SequentialSampler):
        return None
    # With replacement the data set may have no length.
    if not isinstance(sampler, RandomSampler) or sampler.replacement:
        return SameOrder(sampler, seed)
    if len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        return SameOrder(sampler, seed)
    return None


def _share_evenly(loader: DataLoader[Any], rank: int, count: int, seed: int) -> DataLoader[Any]:
    """Return one process's part of a loader that draws each sample once: the samples are dealt, and then batched."""
    sampler = UnpaddedDistributedSampler(loader.dataset, count, rank, shuffle=_shuffles(loader), seed=seed)
    shared = with_sampler(loader, sampler)
    if not loader.drop_last:
        return shared
    # What remains after the last whole step may be a whole batch of one process.
    assert loader.batch_size is not None
    steps = len(loader.dataset) // (loader.batch_size * count)  # type: ignore[arg-type]
    return with_sampler(shared, FirstBatches(shared.batch_sampler, steps), batches=True)


def _dealt_sizes(size: int, step: int, *, processes: int) -> list[int]:
    """Return the samples of each process in a step whose samples are dealt in turn; see `Sizes`."""
    return [count_of_rank(size, rank, processes) for rank in range(processes)]


def _with_batches(loader: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    """Return a copy of a loader with another batch sampler, whose batches may be empty."""
    copy = with_sampler(loader, batches, batches=True)
    # A DataLoader refuses to exchange some of its attributes, so this one is set below that guard too.
    vars(copy)["collate_fn"] = Collate(loader.collate_fn)
    return copy


def _share_stream(loader: DataLoader[Any], rank: int, count: int) -> Any:
    """Return one process's part of a loader of a stream, which divides itself."""
    share = getattr(loader.dataset, "shard", None)
    if not callable(share):
        raise ConfigurationError(
            f"{type(loader.dataset).__name__} is an IterableDataset: only it can divide its samples among processes."
            " Give it a method `shard(num_shards, index)` that returns the part of one process, or say"
            " Trainer(use_distributed_sampler=False) if it reads its own part already."
        )
    return with_dataset(loader, share(num_shards=count, index=rank))
