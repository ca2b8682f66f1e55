"""Tensors of a worker: placeholders first, then values; gradients and buffers by key."""

import pytest
import torch
from torch import nn

from equipoise.extensions.pipeline.messaging.commands import TensorSpec
from equipoise.extensions.pipeline.processes.workers.tensor_store import TensorStore

CPU = torch.device("cpu")
SPECS = [TensorSpec(True, (2, 3), torch.float64), TensorSpec(False, (2,), torch.int64)]


def test_a_tensor_without_values_has_a_shape_and_cannot_be_written_to() -> None:
    store = TensorStore(SPECS, CPU)
    weight = store[0]
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (2, 3)
    assert weight.dtype == torch.float64
    assert not weight.requires_grad
    assert weight.isnan().all()
    assert not isinstance(store[1], nn.Parameter)
    assert store.present == set()
    with torch.no_grad(), pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        weight.add_(1)


def test_values_arrive_in_the_same_object() -> None:
    store = TensorStore(SPECS, CPU)
    weight = store[0]
    values = {0: torch.ones(2, 3, dtype=torch.float64), 1: torch.tensor([1, 2])}
    store.load(values, {0: True, 1: False})
    assert store[0] is weight
    assert weight.requires_grad
    assert torch.equal(weight.detach(), values[0])
    assert store.present == {0, 1}
    assert store.keys_by_identity() == {id(weight): 0, id(store[1]): 1}
    store.set_trainable({0: False})
    assert not weight.requires_grad
    assert torch.equal(store.values_of([1])[1], values[1])


def test_only_present_tensors_are_frozen_and_copied() -> None:
    store = TensorStore(SPECS, CPU)
    store.set_trainable({0: True})
    assert not store[0].requires_grad
    assert store.copy_buffers() == {}
    store.load({1: torch.tensor([1, 2])}, {1: False})
    copies = store.copy_buffers()
    store[1].add_(1)
    assert copies.keys() == {1}
    assert copies[1].tolist() == [1, 2]


def test_gradients_are_set_and_cleared() -> None:
    store = TensorStore(SPECS, CPU)
    store.load({0: torch.ones(2, 3, dtype=torch.float64)}, {0: True})
    gradient = torch.full((2, 3), 2.0, dtype=torch.float64)
    store.set_gradients({0: gradient})
    assert torch.equal(store.gradients_of([0])[0], gradient)
    store.clear_gradients()
    assert store.gradients_of([0]) == {0: None}
