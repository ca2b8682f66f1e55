"""Modules that differ between processes are named, and BatchNorm layers are replaced for a run."""

from typing import Any

import pytest
import torch
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.strategies.distributed import module_sync


def frozen(layer: nn.Module) -> nn.Module:
    """Return a layer whose parameters are frozen."""
    return layer.requires_grad_(False)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: nn.Linear(2, 4), r"rank 0 has weight of shape \[3, 2\], float32, rank 1 has weight of shape \[4, 2\]"),
        (lambda: nn.Linear(2, 3, dtype=torch.float64), r"rank 1 has weight of shape \[3, 2\], float64"),
        (lambda: frozen(nn.Linear(2, 3)), r"rank 1 has weight of shape \[3, 2\], float32, frozen or a buffer"),
        (lambda: nn.Linear(2, 3, bias=False), "rank 0 has 2 tensors, rank 1 has 1 tensors"),
    ],
    ids=["shape", "dtype", "frozen", "number"],
)
def test_the_first_difference_between_processes_is_named(
    other: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gathered(own: Any) -> list[Any]:
        return [own, module_sync._describe(other())]

    monkeypatch.setattr(module_sync, "gather_objects", gathered)
    with pytest.raises(ConfigurationError, match=f"Linear differs between processes: .*{words}"):
        module_sync.check_same_modules(nn.Linear(2, 3))


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
