"""The order of the samples: one process reads the samples that several processes share out in the same step.

Processes draw an order of their own, because a loader's would be another one in each of them. After steps with other
samples the weights could not be compared.
"""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from equipoise.interop.torch.loaders import with_sampler
from equipoise.parallel.batches.sampling import seed_of_order
from equipoise.strategies.distributed.loaders import has_distributed_sampler, order_of_processes

__all__ = ["read_as_processes"]


def read_as_processes(owner: Any) -> None:
    """Let the training loader read its samples in the order in which several processes share them out.

    Several loaders, streams, and batch samplers of the user keep their order.

    Args:
        owner: The data module or module, whose `train_dataloader` returns another loader from now on.
    """
    request = getattr(owner, "train_dataloader", None)
    if request is None:
        return
    owner.train_dataloader = lambda: _in_order_of_processes(request())


def _in_order_of_processes(loader: Any) -> Any:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    # Without a batch size the user's batch sampler decides which samples make a batch.
    if loader.batch_size is None or has_distributed_sampler(loader):
        return loader
    return with_sampler(loader, order_of_processes(loader, seed_of_order()))
