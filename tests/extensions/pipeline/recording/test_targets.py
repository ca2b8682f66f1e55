"""Functions of torch as calls of a graph, in modes of their own."""

import operator
import pickle

import pytest
import torch

from equipoise.extensions.pipeline.recording.targets import present_modes, target_of, under_modes


@pytest.mark.parametrize("gradients", [True, False])
def test_a_call_in_other_modes(gradients):
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16, enabled=gradients):
        modes = present_modes()
    x = torch.rand(2, 2, requires_grad=True)
    for function, args in ((operator.matmul, (x, x)), (torch.Tensor.matmul, (x, x))):
        target = under_modes(target_of(function), modes)
        copied = pickle.loads(pickle.dumps(target.target))
        for call in (target.target, copied):
            with torch.set_grad_enabled(not gradients):
                value = call(*args)
            assert value.requires_grad == gradients
            assert value.dtype == (torch.bfloat16 if gradients else torch.float32)
        assert target.target.__name__ == "matmul"
