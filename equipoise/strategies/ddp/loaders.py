"""Loaders, metrics and values under DDP: sharded, synchronised, reduced."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import Metric

from equipoise.errors import ConfigurationError
from equipoise.interop.torch.loaders import with_dataset, with_sampler
from equipoise.parallel.batches.sampling import (
    NO_BATCH,
    BatchesInTurn,
    Collate,
    Filled,
    SameOrder,
    SharedBatches,
    UnpaddedDistributedSampler,
)
from equipoise.parallel.communication.object_exchange import gather_objects

__all__ = ["gather_tensors", "is_dealt", "reduce_tensor", "share_loader", "synchronise_metrics", "why_not_by_shares"]

Sizes = Callable[[int, int], list[int]]


def share_loader(loader: Any, rank: int, count: int, seed: int, *, training: bool, sizes: Sizes | None = None) -> Any:
    """One process's part of a loader.

    Args:
        loader: The loader, the same in all processes.
        rank: The number of the process.
        count: The number of processes.
        seed: Of the order, the same in all processes.
        training: Whether samples are shared out anew in each epoch; else whole batches, in turn.
        sizes: The parts of a step of so many samples, by its number in the epoch. None: even ones.

    Raises:
        ConfigurationError: If nobody can tell which samples are whose.
    """
    if training and sizes is not None and (why := why_not_by_shares(loader)):
        raise ConfigurationError(f"shares need a DataLoader with a batch_size to cut, {why}. Leave them out.")
    if not isinstance(loader, DataLoader):
        return _Turns(loader, rank, count, fill=training)
    if isinstance(loader.dataset, IterableDataset):
        return _share_stream(loader, rank, count, training=training)
    if isinstance(loader.sampler, DistributedSampler) and not isinstance(loader.sampler, UnpaddedDistributedSampler):
        return loader  # the user's own
    if not training:
        return _evaluated(loader, rank, count)
    if loader.batch_sampler is None:
        return _Turns(with_sampler(loader, SameOrder(loader.sampler, seed)), rank, count, fill=True)
    if loader.batch_size is None:  # a batch sampler of the user's own
        batches = SameOrder(loader.batch_sampler, seed)
        steps = -(-len(batches) // count)
        return _with_batches(loader, Filled(BatchesInTurn(batches, rank, count), steps))
    own = not isinstance(loader.sampler, (RandomSampler, SequentialSampler))
    shuffle = isinstance(loader.sampler, RandomSampler)
    replaces = isinstance(loader.sampler, RandomSampler) and (
        loader.sampler.replacement or len(loader.sampler) != len(loader.dataset)  # type: ignore[arg-type]
    )
    together = loader.batch_size * count
    if own or replaces:
        order: Any = SameOrder(loader.sampler, seed)
    elif sizes is None:
        sampler = UnpaddedDistributedSampler(loader.dataset, count, rank, shuffle=shuffle, seed=seed)
        full, rest = divmod(len(loader.dataset), together)  # type: ignore[arg-type]
        steps = full + bool(rest and not loader.drop_last)
        shared = with_sampler(loader, sampler)
        return _with_batches(shared, Filled(shared.batch_sampler, steps))
    else:
        order = UnpaddedDistributedSampler(loader.dataset, 1, 0, shuffle=shuffle, seed=seed)
    evenly = sizes or (lambda size, step: [len(range(each, size, count)) for each in range(count)])
    return _with_batches(loader, SharedBatches(order, together, evenly, rank, loader.drop_last))


def why_not_by_shares(loader: Any) -> str:
    """Why the samples of a loader's steps cannot be shared out unevenly; empty if they can."""
    if not (isinstance(loader, DataLoader) and loader.batch_size):
        return f"which this {type(loader).__name__} has not"
    if isinstance(loader.dataset, IterableDataset):
        return f"but {type(loader.dataset).__name__} is an IterableDataset, which shares itself out"
    if isinstance(loader.sampler, DistributedSampler) and not isinstance(loader.sampler, UnpaddedDistributedSampler):
        return f"but its {type(loader.sampler).__name__} shares the samples out already"
    return ""


def is_dealt(part: Any) -> bool:
    """Whether a part of a loader consists of its batches in turn."""
    return isinstance(part, _Turns) or isinstance(getattr(part, "batch_sampler", None), BatchesInTurn)


def _with_batches(loader: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    other = with_sampler(loader, batches, batches=True)
    vars(other)["collate_fn"] = Collate(loader.collate_fn)
    return other


def _evaluated(loader: DataLoader[Any], rank: int, count: int) -> Any:
    if loader.batch_sampler is None:
        return _Turns(loader, rank, count, fill=False)
    in_order = loader.batch_size is not None and isinstance(loader.sampler, SequentialSampler)
    batches = loader.batch_sampler if in_order else SameOrder(loader.batch_sampler)
    return with_sampler(loader, BatchesInTurn(batches, rank, count), batches=True)


def _share_stream(loader: DataLoader[Any], rank: int, count: int, *, training: bool) -> Any:
    """A loader over a stream, which must be able to share itself out."""
    share = getattr(loader.dataset, "shard", None)
    if not callable(share):
        raise ConfigurationError(
            f"{type(loader.dataset).__name__} is an IterableDataset: which samples are whose only it can tell. Give"
            " it a method `shard(num_shards, index)` that returns the part of one process, or say"
            " Trainer(use_distributed_sampler=False) if it reads its own part already."
        )
    own = with_dataset(loader, share(num_shards=count, index=rank))
    return _UntilAllAreDone(own) if training else own


class _UntilAllAreDone:
    """A loader that ends in all processes at once: `NO_BATCH` while others still have batches.

    Args:
        loader: This process's own.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.dataset, self.sampler = loader, loader.dataset, loader.sampler

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        backend = dist.get_backend()
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        while True:
            batch = next(batches, NO_BATCH)
            some = torch.tensor(int(batch is not NO_BATCH), device=device)
            dist.all_reduce(some)
            if not int(some):
                return
            yield batch


class _Turns:
    """Every so many batches of an iterable that is no DataLoader.

    Args:
        loader: The iterable, the same in all processes.
        rank: The number of this process.
        count: The number of processes.
        fill: Whether each round has as many batches in all processes, `NO_BATCH` if need be.
    """

    def __init__(self, loader: Any, rank: int, count: int, *, fill: bool) -> None:
        self.loader, self.rank, self.processes, self.fill = loader, rank, count, fill
        self.sampler = getattr(loader, "sampler", None)

    def __len__(self) -> int:
        batches = len(self.loader)
        return -(-batches // self.processes) if self.fill else len(range(self.rank, batches, self.processes))

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            turn = list(islice(batches, self.processes))
            if self.rank < len(turn):
                yield turn[self.rank]
            elif turn and self.fill:
                yield NO_BATCH
            if len(turn) < self.processes:
                return


# Values


_OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def reduce_tensor(tensor: Tensor, device: torch.device, group: Any, reduce_op: Any) -> Tensor:
    """The reduction of a tensor over all processes.

    Args:
        tensor: The tensor, which stays as it is.
        device: Where this process computes.
        group: The process group. None: all processes.
        reduce_op: "mean", "avg", "sum", "min" or "max", or torch's operation of that name.
    """
    name = str(getattr(reduce_op, "name", reduce_op) or "mean").lower()
    reduced = tensor.detach().to(device, copy=True)
    dist.all_reduce(reduced, _OPERATIONS[name], group=group)
    return reduced / dist.get_world_size(group) if name in ("mean", "avg") else reduced


def gather_tensors(value: Any, device: torch.device, group: Any, sync_grads: bool) -> Any:
    """The tensors of all processes, each along a new first dimension.

    Args:
        value: A tensor or a collection of tensors and numbers, of the same shapes in all processes.
        device: Where this process computes.
        group: The process group. None: all processes.
        sync_grads: Whether gradients flow back.
    """

    def gather(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device).contiguous()
        if sync_grads and tensor.requires_grad:
            from torch.distributed.nn.functional import all_gather

            return torch.stack(all_gather(tensor, group))  # type: ignore[no-untyped-call]
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor.detach(), group=group)
        return torch.stack(gathered)

    value = apply_to_collection(value, (int, float), lambda number: torch.tensor(number))
    return apply_to_collection(value, Tensor, gather)


# Metrics


def synchronise_metrics(module: nn.Module) -> Callable[[], None]:
    """Lets the metrics of a module be computed over all processes, also where some have seen nothing.

    Returns:
        A function that leaves them as they were.
    """
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    before = [(m.dist_sync_fn, m.distributed_available_fn, m.dist_sync_on_step) for m in metrics]
    ours = [metric for metric in metrics if metric.dist_sync_fn is None]
    for metric in ours:
        metric.dist_sync_fn, metric.distributed_available_fn = _gather_states, dist.is_initialized
        vars(metric)["sync"] = partial(_fill_and_sync, metric)
    for metric in metrics:
        metric.dist_sync_on_step = False  # processes have unequal numbers of batches

    def restore() -> None:
        for metric, (gather, available, on_step) in zip(metrics, before, strict=True):
            metric.dist_sync_fn, metric.distributed_available_fn = gather, available
            metric.dist_sync_on_step = on_step
        for metric in ours:
            vars(metric).pop("sync", None)

    return restore


def _fill_and_sync(metric: Metric, *, should_sync: bool = True, **kwargs: Any) -> None:
    """Exchanges a metric's states, which goes entry by entry: lists take part in equal lengths, none without an entry.

    What they are filled up with is empty, and left out of what is gathered.
    """
    lists = {name: state for name, state in metric.metric_state.items() if isinstance(state, list)}
    if should_sync and lists and dist.is_initialized():
        lengths = gather_objects({name: len(state) for name, state in lists.items()})
        for name, state in lists.items():
            longest = max(1, *(each[name] for each in lengths))
            like = state[0] if state else torch.zeros(0, device=metric.device)
            setattr(metric, name, [*state, *([like.new_zeros(0)] * (longest - len(state)))])
    type(metric).sync(metric, should_sync=should_sync, **kwargs)


def _gather_states(state: Tensor, group: Any = None) -> list[Tensor]:
    """A metric's state in all processes, whatever its shape in each; empty ones are left out if others are not."""
    states = gather_objects(state.detach().cpu(), group)
    full = [each for each in states if each.numel()] or states[:1]
    return [each.to(state.device) for each in full]
