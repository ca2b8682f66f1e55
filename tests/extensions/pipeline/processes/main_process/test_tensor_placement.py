"""Record of tensors: keys, the processes that have them, and tied parameters."""

import torch
from torch import nn

from equipoise.extensions.pipeline.messaging.commands import TensorSpec
from equipoise.extensions.pipeline.processes.main_process.tensor_placement import TensorPlacement

# Stages 0 and 1 are the workers'.
LAST = 2


def module_with_tie() -> nn.Sequential:
    first = nn.Linear(2, 2, dtype=torch.float64)
    second = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    second.weight = first.weight
    return nn.Sequential(first, nn.BatchNorm1d(2, affine=False), second)


def test_keys_are_indices_of_parameters_then_buffers() -> None:
    module = module_with_tie()
    placement = TensorPlacement(module, LAST)
    assert [placement.key_of(tensor) for tensor in module.parameters()] == [0, 1]
    assert [placement.key_of(tensor) for tensor in module.buffers()] == [2, 3, 4]
    assert placement.key_of(torch.zeros(1)) is None
    assert placement.specs()[0] == TensorSpec(True, (2, 2), torch.float64)
    assert placement.specs()[4] == TensorSpec(False, (), torch.int64)
    layers = {"tie": module[2], "constant": torch.zeros(1), "function": print}
    assert placement.keys_of_layers(layers) == {0}


def test_at_first_the_main_process_has_all() -> None:
    placement = TensorPlacement(module_with_tie(), LAST)
    assert placement.keys_elsewhere() == []
    assert placement.has_tensor(LAST, 0)
    assert not placement.has_tensor(0, 0)
    assert placement.owner_of(0) == LAST
    assert placement.tied_parameters() == {}


def test_tensors_of_workers() -> None:
    placement = TensorPlacement(module_with_tie(), LAST)
    placement.need_here({0})
    placement.add_worker(1, [0, 1])
    placement.add_worker(0, [0])
    assert placement.owner_of(0) == 0
    assert placement.owner_of(1) == 1
    assert placement.keys_in_workers() == [0, 1]
    assert placement.keys_of_worker(0) == [0]
    assert placement.keys_of_worker(1) == [0, 1]
    # The main process needs the first, too.
    assert placement.keys_elsewhere() == [1]
    assert placement.has_tensor(LAST, 0)
    assert not placement.has_tensor(LAST, 1)
    placement.clear()
    assert placement.keys_elsewhere() == []
    assert placement.owner_of(1) == LAST


def test_parameters_of_several_processes_are_tied_while_they_are_trainable() -> None:
    module = module_with_tie()
    placement = TensorPlacement(module, LAST)
    placement.add_worker(0, [0, 1])
    assert placement.tied_parameters() == {}
    placement.need_here({0})
    assert placement.tied_parameters() == {0: [0]}
    placement.add_worker(1, [1])
    assert placement.tied_parameters() == {0: [0], 1: [0, 1]}
    module[0].weight.requires_grad_(False)
    assert placement.tied_parameters() == {1: [0, 1]}
