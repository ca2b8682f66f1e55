"""BatchNorm layers are replaced for a run."""

import torch
from torch import nn

from equipoise.strategies.distributed import module_sync


def test_batch_norms_share_their_tensors_with_those_of_all_processes() -> None:
    norm = nn.BatchNorm2d(4)
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(norm), nn.LayerNorm(4))
    restore = module_sync.share_batch_statistics(network, torch.device("cuda"))

    synchronised = network.get_submodule("1.0")
    assert isinstance(synchronised, nn.SyncBatchNorm)
    assert synchronised.weight is norm.weight
    assert synchronised.running_mean is norm.running_mean

    network.eval()
    restore()
    assert network.get_submodule("1.0") is norm
    assert not norm.training
