"""Places of the parts of a network."""

import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.execution.placement import Placement
from tests.support.traces import traced

CPU = torch.device("cpu")


class Counts(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, values: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.linear(values)


def test_a_buffer_that_is_replaced_is_not_taken_for_another() -> None:
    """Which another stage of another device would have."""
    network = nn.Sequential(Counts(), Counts())
    recorded = traced(network, torch.ones(1, 2))
    placement = Placement(network, [CPU, CPU])
    placement.place(network, recorded, [1, len(recorded.calls)])
    known = set(placement._stages)
    with torch.no_grad():
        network(torch.ones(1, 2))
    new = [*network.buffers(), *(torch.zeros(()) for _ in range(1000))]
    assert not known & {id(tensor) for tensor in new}
