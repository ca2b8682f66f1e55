"""Modules whose parameters have no memory when they are made."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from equipoise.extensions.fsdp.state.empty_modules import ParametersOnMeta


class Unusual(torch.nn.Module):
    """Computes with its parameters as it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.layer.weight.data = torch.eye(2)
        self.scaled = self.layer.weight.detach() * torch.tensor([1.0, 2.0])
        viewed = torch.nn.Parameter(torch.ones(4))
        self.view = viewed.view(2, 2)
        self.viewed = viewed
        self.register_buffer("steps", torch.arange(2.0))
        with torch.no_grad(), pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            self.steps.copy_(self.layer.bias)


def test_parameters_without_memory_in_a_module_that_computes_with_them() -> None:
    with ThreadPoolExecutor(1) as other_thread, ParametersOnMeta():
        module = Unusual()
        layer = other_thread.submit(torch.nn.Linear, 2, 2).result()
    assert all(tensor.is_meta for tensor in (module.layer.weight, module.layer.bias, module.scaled))
    # Torch does not exchange it while it has a view.
    assert torch.equal(module.viewed, torch.ones(4))
    assert torch.equal(module.steps, torch.arange(2.0))
    assert not layer.weight.is_meta
    assert not torch.nn.Linear(2, 2).weight.is_meta
