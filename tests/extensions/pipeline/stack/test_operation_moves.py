"""Operations on tensors of several devices compute on one. The second device here is one without values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from equipoise.extensions.pipeline.stack.operation_moves import OperationMoves

META = torch.device("meta")


def tensors() -> tuple[Tensor, Tensor]:
    return torch.ones(3), torch.ones(3, device=META)


@pytest.mark.parametrize(
    "compute",
    [
        lambda here, there: here + there,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: torch.where(here > 0, there, here),
        lambda here, there: functional.mse_loss(here, target=there),
    ],
)
def test_mixed_operations_compute_where_the_stage_is(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    here, there = tensors()
    with OperationMoves(META):
        assert compute(here, there).device == META


def test_operations_on_one_device_and_with_numbers_stay_there() -> None:
    _, there = tensors()
    with OperationMoves(torch.device("cpu")):
        assert (there * torch.tensor(2.0)).device == META
        assert (there + there).device == META


@pytest.mark.parametrize(
    "change",
    [
        lambda target, other: target.add_(other),
        lambda target, other: target.__setitem__(slice(None), other),
        lambda target, other: target.__iadd__(other),
        lambda target, other: torch.add(other, other, out=target),
    ],
)
def test_changes_in_place_compute_where_the_changed_tensor_is(change: Callable[[Tensor, Tensor], Any]) -> None:
    here, there = tensors()
    with OperationMoves(torch.device("cpu")):
        # The values of the other device cannot be read, so a move in the wrong direction is an error.
        change(there, here)
        with pytest.raises(NotImplementedError):
            change(here, there)
    assert there.device == META


def test_statistics_stay_where_they_are() -> None:
    mean, variance = torch.zeros(3, device=META), torch.ones(3, device=META)
    with OperationMoves(torch.device("cpu")):
        output = functional.batch_norm(torch.randn(4, 3), mean, variance, training=True)
    assert output.device == META


def test_a_tensor_is_moved_once_until_it_changes() -> None:
    here, there = tensors()
    moves = OperationMoves(META)
    with moves:
        first = moves.here(here)
        assert moves.here([here])[0] is first
        here.add_(1)
        assert moves.here({"x": here})["x"] is not first
        assert moves.here(there) is there
        moves.go_to(torch.device("cpu"))
        assert moves.here(here) is here
