"""Parameters and their copies, connected for autograd."""

import pytest
import torch
from torch import Tensor, nn

from equipoise.parallel.replicas.autograd_link import connect


def parameters() -> tuple[list[nn.Parameter], list[list[Tensor]]]:
    torch.manual_seed(0)
    sources = [nn.Parameter(torch.randn(3, dtype=torch.float64), requires_grad=index != 1) for index in range(4)]
    return sources, [[source.detach().clone() for source in sources] for _ in range(2)]


def computed(first: list[Tensor], second: list[Tensor]) -> Tensor:
    """The last parameter is not used, the third by one copy alone."""
    return (first[0] ** 3 * first[1]).sum() + (2 * second[0] ** 2 * second[2]).sum()


def test_second_derivatives_pass_through_connected_copies() -> None:
    sources, copies = parameters()
    learned = [sources[0], sources[2]]

    def penalty(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
        slopes = torch.autograd.grad(computed(first, second), learned, create_graph=True)
        return list(torch.autograd.grad(sum(slope.square().sum() for slope in slopes), learned))

    torch.testing.assert_close(penalty(*connect(sources, copies)), penalty(list(sources), list(sources)))


def test_values_lie_in_the_memory_of_the_copies() -> None:
    sources, copies = parameters()
    (connected, _) = connect(sources, copies)
    assert [tensor.requires_grad for tensor in connected] == [True, False, True, True]
    for tensor, copy in zip(connected, copies[0], strict=True):
        assert tensor.data_ptr() == copy.data_ptr()
    loss = computed(connected, connected)
    copies[0][0].add_(1)  # as an optimiser's step would
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
