"""Memory of a model, counted by its storages."""

import torch
from torch import nn

from equipoise.memory.footprint import Footprint, footprint_of


def test_parameters_gradients_and_state() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(module.parameters())
    parameters = 4 * (8 * 4 + 4 + 4 + 4)
    buffers = 4 * (4 + 4) + 8  # means, variances, a counter of int64
    assert footprint_of(module, [optimizer], "cpu") == Footprint(parameters + buffers)
    module(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    steps = 4 * 4  # a float32 for each of four parameters
    held = footprint_of(module, [optimizer], "cpu")
    assert held == Footprint(parameters + buffers, parameters, 2 * parameters + steps)
    assert held.total == 4 * parameters + buffers + steps


def test_shared_storages_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.other.weight = self.one.weight
            self.register_buffer("view", self.one.weight.detach()[0])

    assert footprint_of(Tied(), [], "cpu").parameters == 64


def test_a_device_that_holds_a_copy() -> None:
    """Of which nothing is known but that it has the same parameters and gradients."""
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    assert footprint_of(module, [], "cuda:1") == Footprint(24, 24)


def test_tensors_without_storage_have_no_footprint() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    assert footprint_of(embedding, [], "cpu") == Footprint(48)
    assert footprint_of(nn.LazyLinear(3), [], "cpu") == Footprint()
    assert footprint_of(nn.Linear(2, 2, device="meta"), [], "cpu") == Footprint()
