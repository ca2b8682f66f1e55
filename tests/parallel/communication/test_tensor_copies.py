"""Values that the first process of a group gives to the others."""

import torch
import torch.distributed as dist

from equipoise.parallel.communication.tensor_copies import copy_from_first
from tests.support.process_groups import in_group


def copied(rank: int) -> list[float]:
    """Return values of a dense and a sparse tensor after copies among the first process alone, and among the others."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    tensor = torch.full((2,), rank + 1.0)
    tensors = [tensor, tensor.to_sparse()]
    copy_from_first(tensors, groups[min(rank, 1)])
    return [tensor.to_dense()[1].item() for tensor in tensors]


def test_values_come_from_the_first_process_of_the_group() -> None:
    assert in_group(copied, processes=3) == [[1, 1], [2, 2], [2, 2]]
