"""Places of the parts of a network."""

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.execution.placement import Placement
from tests.support.networks.layers import network
from tests.support.traces import traced

CPU = torch.device("cpu")


def counting() -> nn.Module:
    """Puts another tensor in the place of its buffer in every forward."""

    def forward(self: Any, values: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.linear(values)

    made = network(forward, linear=nn.Linear(2, 2))
    made.register_buffer("count", torch.zeros(()))
    return made


def test_a_buffer_that_is_replaced_is_not_taken_for_another() -> None:
    """Which another stage of another device would have."""
    module = nn.Sequential(counting(), counting())
    recorded = traced(module, torch.ones(1, 2))
    placement = Placement(module, [CPU, CPU])
    placement.place(module, recorded, [1, len(recorded.calls)])
    known = set(placement._stages)
    with torch.no_grad():
        module(torch.ones(1, 2))
    new = [*module.buffers(), *(torch.zeros(()) for _ in range(1000))]
    assert not known & {id(tensor) for tensor in new}
