"""Costs of a stack's layers are those of the forward and of the backward that belong to each layer."""

from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equipoise.extensions.pipeline.graph.call_structure import CallStructure, NetworkCall
from equipoise.extensions.pipeline.stack import stack_profile
from equipoise.extensions.pipeline.stack.layer_stack import largest_stack
from equipoise.extensions.pipeline.stack.stack_profile import StackProfile, profile_stack
from tests.support.networks.layers import network

LAYERS = 3


def between(*, is_checkpointed: bool = False) -> nn.Module:
    """Layers between two others; if they are checkpointed, the backward computes them again."""

    def forward(self: Any, value: Tensor) -> Tensor:
        value = self.first(value)
        for layer in self.layers:
            value = checkpoint(layer, value, use_reentrant=False) if is_checkpointed else layer(value)
        return self.last(value)

    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))
    return network(forward, first=nn.Linear(2, 4), layers=layers, last=nn.Linear(4, 1))


def profile(made: nn.Module, width: int = 2) -> StackProfile:
    stack = largest_stack(made)
    assert stack is not None
    structure = CallStructure((torch.randn(5, width),), {})
    return profile_stack(stack, NetworkCall(made, made.forward, structure, made, torch.device("cpu")))


def tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second pass each time the clock is read: where a layer begins, and at the end of the forward."""
    seconds = count()
    monkeypatch.setattr(stack_profile, "now", lambda device: float(next(seconds)))


def test_times_of_the_backward_are_no_times_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    tick(monkeypatch)
    blocks = profile(between(is_checkpointed=True)).blocks
    # What comes before the first layer belongs to it, so the clock is not read where that begins.
    assert [block.forward for block in blocks] == [1.0] * LAYERS
    assert all(block.backward >= 1.0 for block in blocks)


class Pair(nn.Module):
    """Takes two values, and passes both on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, value: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(value), total + value


def test_the_backward_of_a_layer_ends_with_the_gradient_of_one_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, value: Tensor) -> Tensor:
        value = total = self.first(value)
        for layer in self.layers:
            value, total = layer(value, total)
        return value + total

    made = network(forward, first=nn.Linear(2, 2), layers=nn.ModuleList(Pair() for _ in range(LAYERS)))
    tick(monkeypatch)
    # The end of the whole backward belongs to the first layer.
    assert [block.backward for block in profile(made).blocks] == [2.0, 1.0, 1.0]


def test_no_hook_stays_on_a_parameter_that_the_layers_receive() -> None:
    def forward(self: Any, value: Tensor) -> Tensor:
        prompt = self.prompt
        for layer in self.layers:
            prompt, value = layer(prompt, value)
        return prompt * value

    made = network(forward, prompt=nn.Parameter(torch.ones(2)), layers=nn.ModuleList(Pair() for _ in range(LAYERS)))
    profile(made)
    assert not made.prompt._backward_hooks


def test_what_lies_around_the_layers_belongs_to_the_first_and_to_the_last() -> None:
    first, last = 4 * (2 * 4 + 4), 4 * (4 + 1)
    each = 4 * (4 * 4 + 4)
    blocks = profile(between()).blocks
    assert [block.parameters for block in blocks] == [first + each, each, each + last]
    assert [block.trained for block in blocks] == [block.parameters for block in blocks]


def test_checkpointed_layers_save_less() -> None:
    plain, checkpointed = profile(between()), profile(between(is_checkpointed=True))
    for index in range(1, LAYERS):
        assert checkpointed.blocks[index].parameters == plain.blocks[index].parameters
    assert sum(block.saved for block in checkpointed.blocks) <= sum(block.saved for block in plain.blocks)


class Mask(nn.Module):
    """Multiplies by a buffer, which its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("mask", torch.rand(4))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.scale * self.mask


def test_buffers_are_no_activations() -> None:
    samples = 5
    for block in profile(nn.Sequential(*[Mask() for _ in range(LAYERS)]), width=4).blocks:
        assert block.parameters == 4 + 4 * 4
        # What the scale multiplies; the product is not kept, as the mask requires no gradient.
        assert block.saved == samples * 4 * 4
