"""Tensors without memory: what they are used for, and the guesses where values are missing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from equipoise.extensions.common.interop import FakeTensors, is_fake
from equipoise.memory.profile.ledger import Ledger


@pytest.mark.parametrize(
    ("shape", "select"),
    [
        ((12,), lambda values: values[values > 0]),
        ((3, 4), lambda values: values[:, torch.ones(4) > 0]),
        ((12, 2), lambda values: (values > 0).nonzero()),
        ((12,), lambda values: torch.masked_select(values, values > 0)),
        ((12,), torch.unique),
        ((3,), lambda values: values[torch.zeros(3) > 0, torch.tensor([1])]),
    ],
)
def test_shapes_of_masks_are_the_largest(shape: tuple[int, ...], select: Callable[[Tensor], Tensor]) -> None:
    guesses: list[str] = []
    with FakeTensors(guesses.append).active():
        result = select(torch.ones(3, 4))
    assert result.shape == shape
    assert "as large as it can be" in guesses[0]


def test_results_are_those_of_the_kernels() -> None:
    """A workspace, and dtypes under autocast, of which torch's shapes without memory know less than the kernels."""

    def sizes_of(layer: nn.Module, values: Tensor) -> list[int]:
        ledger = Ledger(layer)
        ledger.start()
        with torch.autocast("cpu", torch.bfloat16, enabled=isinstance(layer, nn.Sequential)):
            output = layer(values)
        (output[0] if isinstance(output, tuple) else output).float().sum().backward()
        ledger.stop()
        records, _ = ledger.history("cpu")
        return [record.nbytes for record in records if record.nbytes > 100]

    builds = {
        "lstm": (lambda: nn.LSTM(16, 48), (20, 24, 16)),
        "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16)), (8, 3, 9, 9)),
    }
    for name, (build, shape) in builds.items():
        real = sizes_of(build(), torch.zeros(shape))
        with FakeTensors(print).active():
            fake = sizes_of(build(), torch.zeros(shape))
        assert sum(fake) == pytest.approx(sum(real), rel=0.03), name
        assert len(fake) == pytest.approx(len(real), abs=2), name


def test_what_cannot_be_guessed_is_raised() -> None:
    """No value stands for the comparison of all values of two tensors."""
    with FakeTensors(print).active(), pytest.raises(DataDependentOutputException):
        torch.equal(torch.ones(2), torch.ones(2))


def test_no_workspace_without_a_backward() -> None:
    with FakeTensors(print).active(), torch.no_grad():
        output, _ = nn.LSTM(4, 6)(torch.zeros(5, 2, 4))
    assert output.shape == (5, 2, 6)


def test_a_group_norm_of_one_dtype() -> None:
    with FakeTensors(print).active():
        values = torch.ones(2, 4, 3, requires_grad=True)
        nn.GroupNorm(2, 4)(values).sum().backward()
    assert values.grad is not None
    assert values.grad.dtype is torch.float32


def test_a_module_is_converted_as_it_is_built() -> None:
    """Parameters stay the same objects, as peft expects of adapters that take the dtype of their base."""
    with FakeTensors(print).active():
        layer = nn.Linear(2**18, 2**18)
        weight = layer.weight
        layer.to("cpu", torch.bfloat16)
        layer(torch.ones(4, 2**18, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight is weight
    assert is_fake(weight)
    assert weight.grad is not None
    assert weight.dtype == weight.grad.dtype == torch.bfloat16
