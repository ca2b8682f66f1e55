"""The inner workings of torch's compiler that compiled steps rely on are still there, and do what is relied upon."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.extensions.compiled.interop import compiling
from equipoise.extensions.compiled.interop.compiling import (
    CompiledFunction,
    CompilerError,
    NewVariant,
    why_not_compiled,
)
from equipoise.extensions.compiled.interop.features import COMPILE, COMPILE_BLOCKS
from equipoise.interop import adapters

pytestmark = pytest.mark.usefixtures("lowering")
X = torch.ones(3, 2, dtype=torch.float64)


class Steps:
    """A step with its backward, which depends on an attribute."""

    def __init__(self) -> None:
        self.layer = nn.Linear(2, 1).double()
        self.scale = 2.0

    def compute(self, x: Tensor) -> Tensor:
        loss = (self.layer(x) * self.scale).sum()
        loss.backward()
        return loss.detach()


def test_a_missing_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import config

    present = vars(config)
    monkeypatch.setattr(adapters, "find", lambda name: None if "trace_autograd_ops" in name else present)
    assert "lacks torch._dynamo.config.trace_autograd_ops; versions 2.11.0 to" in str(why_not_compiled(COMPILE))


def test_every_setting_is_among_the_names_that_are_checked() -> None:
    names = [name for feature in (COMPILE, COMPILE_BLOCKS) for adapter in feature.adapters for name in adapter.names]
    assert all(f"torch._dynamo.config.{name}" in names for name in compiling._SETTINGS)


def test_gradients_and_attributes_are_conditions_of_a_variant() -> None:
    steps = Steps()
    function = CompiledFunction(steps.compute)
    function.compile(X)
    steps.layer.zero_grad()
    function(X)
    # The gradients are there now, and would be added to.
    with pytest.raises(NewVariant):
        function(X)
    steps.layer.zero_grad()
    steps.scale = 3.0
    with pytest.raises(NewVariant):
        function(X)
    assert function.unmet_conditions(X) == ["self.scale == 2.0"]
    assert steps.layer.weight.grad is None


@pytest.mark.thorough
def test_functions_with_the_same_code_have_variants_of_their_own() -> None:
    first = CompiledFunction(Steps().compute)
    first.compile(X)
    for _ in range(8):
        CompiledFunction(Steps().compute).compile(X)
    second = CompiledFunction(Steps().compute)
    with pytest.raises(NewVariant):
        second(X)
    assert second.unmet_conditions(X) == []


def prints(x: Tensor) -> Tensor:
    print("x")
    return x


def test_the_reason_of_an_error_names_the_line() -> None:
    with pytest.raises(CompilerError, match=rf"test_compiling.py, line {prints.__code__.co_firstlineno + 1}"):
        CompiledFunction(prints).compile(torch.ones(1))


def test_modes_and_casts_are_as_before_after_an_error_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traced graph enters autocast, which keeps casts of parameters, and turns off gradients, by calls of its own."""
    weight = nn.Parameter(torch.ones(2, 2))

    def fail(*args: Any) -> Any:
        torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, True)
        torch.ones(3, 2).mm(weight)
        torch.set_grad_enabled(False)
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(compiling, "_lower", lambda graph, inputs: fail)
    function = CompiledFunction(Steps().compute)
    for call in (function.compile, function):
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            call(X)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            weight.mul_(2)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(torch.ones(3, 2).mm(weight)[0].float(), weight.sum(0))
