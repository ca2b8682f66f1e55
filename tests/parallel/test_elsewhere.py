"""Parameters of other processes: what they are can be asked, what they hold cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.parallel.elsewhere import ElsewhereParameter, bring_back, send_elsewhere


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda p: tuple(p.shape), (3, 4)),
        (len, 3),
        (torch.numel, 12),
        (lambda p: p.dtype, torch.float64),
        (lambda p: p.nbytes, 96),
        (lambda p: p in {p}, True),
        (lambda p: p in [p], True),
        (lambda p: tuple(p.data.shape), (3, 4)),
        (lambda p: p.grad, None),
    ],
    ids=["shape", "len", "numel", "dtype", "nbytes", "set", "list", "data", "grad"],
)
def test_questions_that_need_no_values_are_answered(question: Callable[[Tensor], Any], answer: Any) -> None:
    parameter = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    send_elsewhere(parameter)
    assert type(parameter) is ElsewhereParameter
    assert question(parameter) == answer


def test_values_are_refused_until_they_are_back() -> None:
    parameter = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    send_elsewhere(parameter)
    for read in (torch.Tensor.sum, torch.Tensor.tolist, lambda p: p.data.clone(), torch.Tensor.isnan):
        with pytest.raises(StepError, match=r"another stage \(shape \(3, 4\), torch.float64\)"):
            read(parameter)
    bring_back(parameter, torch.full((3, 4), 2.0, dtype=torch.float64))
    assert parameter.sum().item() == 24.0
