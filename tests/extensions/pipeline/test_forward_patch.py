"""Forwards of modules are replaced for a while, and the original ones return."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.forward_patch import ForwardPatch


def doubled(value: Tensor) -> Tensor:
    return value * 2


@pytest.fixture
def network() -> nn.Sequential:
    """Two layers; the second has a forward of its own on the instance."""
    network = nn.Sequential(nn.Identity(), nn.Identity())
    network[1].forward = doubled
    return network


def patch_of(network: nn.Sequential) -> ForwardPatch:
    def replacement_for(name: str) -> Callable[..., Any]:
        return lambda value: value + 10 ** int(name)

    patch = ForwardPatch(dict(network.named_modules()), replacement_for)
    patch.add("0")
    patch.add("1")
    return patch


def is_original(network: nn.Sequential) -> bool:
    return "forward" not in vars(network[0]) and network[1].forward is doubled


def test_forwards_are_replaced_within_the_context(network: nn.Sequential) -> None:
    with patch_of(network).applied():
        assert network(torch.zeros(())).item() == 11
    assert is_original(network)
    assert network(torch.ones(())).item() == 2


def test_the_original_forwards_return_after_an_error(network: nn.Sequential) -> None:
    with pytest.raises(ZeroDivisionError), patch_of(network).applied():
        raise ZeroDivisionError
    assert is_original(network)


def test_the_original_forwards_run_within_a_replacement(network: nn.Sequential) -> None:
    patch = patch_of(network)
    with patch.applied():
        with patch.removed():
            assert is_original(network)
        assert network(torch.zeros(())).item() == 11
    assert is_original(network)
