"""Parameters of other processes: what they are can be asked, what they hold cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.pipeline.messaging.remote_parameters import ElsewhereParameter, bring_back, send_elsewhere


def elsewhere() -> nn.Parameter:
    """A parameter whose values have moved to another process."""
    parameter = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    send_elsewhere(parameter, parameter.detach())
    return parameter


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda p: tuple(p.shape), (3, 4)),
        (lambda p: p.nbytes, 96),
        (lambda p: p in [p], True),
        (lambda p: tuple(p.data.shape), (3, 4)),
        (lambda p: p.type(), "torch.DoubleTensor"),
        (lambda p: p.is_pinned(), False),
    ],
    ids=["shape", "nbytes", "list", "data", "type", "is_pinned"],
)
def test_questions_that_need_no_values_are_answered(question: Callable[[Tensor], Any], answer: Any) -> None:
    parameter = elsewhere()
    assert type(parameter) is ElsewhereParameter
    assert question(parameter) == answer


@pytest.mark.parametrize("write", [repr, "{}".format])
def test_it_can_be_printed(write: Callable[[Tensor], str]) -> None:
    parameter = elsewhere()
    for shown in (parameter, parameter.data, parameter.detach()):
        told = "<shape (3, 4), torch.float64, device cpu; the values are in another process>"
        assert write(shown).endswith(told)


def test_values_are_refused_until_they_are_back() -> None:
    parameter = elsewhere()
    converted = [lambda p: p.type(torch.float16), lambda p: p.type(dtype=torch.float16), "{:.3f}".format]
    for read in (torch.Tensor.sum, torch.Tensor.tolist, lambda p: p.data.clone(), torch.Tensor.isnan, *converted):
        with pytest.raises(StepError, match=r"another stage \(shape \(3, 4\), torch.float64\)"):
            read(parameter)
    bring_back(parameter, torch.full((3, 4), 2.0, dtype=torch.float64))
    assert parameter.sum().item() == 24.0


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.grad,
        lambda p: setattr(p, "grad", None),
        lambda p: p.register_hook(torch.neg),
        lambda p: nn.utils.clip_grad_norm_(p, 1.0),
        lambda p: torch.optim.SGD([p]).step(),
    ],
    ids=["read", "set", "hook", "clip", "step"],
)
def test_gradients_are_refused(use: Callable[[Tensor], Any]) -> None:
    parameter = elsewhere()
    with pytest.raises(StepError, match=r"gradient of a parameter of another stage.*engine='threads'"):
        use(parameter)
