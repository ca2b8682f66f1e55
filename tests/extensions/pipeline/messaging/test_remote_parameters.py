"""Parameters of other processes: what they are can be asked, what they hold cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.pipeline.messaging.remote_parameters import ElsewhereParameter, bring_back, send_elsewhere


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
        (lambda p: p.type(), "torch.DoubleTensor"),
        (lambda p: p.is_pinned(), False),
    ],
    ids=["shape", "len", "numel", "dtype", "nbytes", "set", "list", "data", "grad", "type", "is_pinned"],
)
def test_questions_that_need_no_values_are_answered(question: Callable[[Tensor], Any], answer: Any) -> None:
    parameter = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    send_elsewhere(parameter, parameter.detach())
    assert type(parameter) is ElsewhereParameter
    assert question(parameter) == answer


@pytest.mark.parametrize("of", [lambda p: p, lambda p: p.data, lambda p: p.detach()], ids=["itself", "data", "detach"])
@pytest.mark.parametrize(
    "write", [str, repr, "{}".format, "{!r}".format, "%s".__mod__], ids=["str", "repr", "format", "format!r", "%s"]
)
def test_it_can_be_printed(of: Callable[[Tensor], Tensor], write: Callable[[Tensor], str]) -> None:
    parameter = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    send_elsewhere(parameter, parameter.detach())
    told = "<shape (3, 4), torch.float64, device cpu; the values are in another process>"
    assert write(of(parameter)).endswith(told)


def test_values_are_refused_until_they_are_back() -> None:
    parameter = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    send_elsewhere(parameter, parameter.detach())
    converted = [lambda p: p.type(torch.float16), lambda p: p.type(dtype=torch.float16), "{:.3f}".format]
    for read in (torch.Tensor.sum, torch.Tensor.tolist, lambda p: p.data.clone(), torch.Tensor.isnan, *converted):
        with pytest.raises(StepError, match=r"another stage \(shape \(3, 4\), torch.float64\)"):
            read(parameter)
    bring_back(parameter, torch.full((3, 4), 2.0, dtype=torch.float64))
    assert parameter.sum().item() == 24.0
