"""The inner workings of torch's compiler that compiled steps rely on are still there, and do what is relied upon."""

from collections.abc import Callable
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
from equipoise.extensions.compiled.interop.features import CAPTURE, COMPILE, COMPILE_BLOCKS
from equipoise.interop import adapters
from equipoise.interop.adapters import Feature

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


@pytest.mark.parametrize("feature", [COMPILE, CAPTURE], ids=lambda feature: feature.key)
def test_torch_has_the_names_that_are_needed(feature: Feature) -> None:
    assert why_not_compiled(feature) is None


def test_a_missing_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import config

    present = vars(config)
    monkeypatch.setattr(adapters, "find", lambda name: None if "trace_autograd_ops" in name else present)
    assert "lacks torch._dynamo.config.trace_autograd_ops; versions 2.11.0 to" in str(why_not_compiled(COMPILE))


def test_every_setting_is_among_the_names_that_are_checked() -> None:
    names = [name for feature in (COMPILE, COMPILE_BLOCKS) for adapter in feature.adapters for name in adapter.names]
    assert all(f"torch._dynamo.config.{name}" in names for name in compiling._SETTINGS)


def test_a_compiled_function_computes_its_backward() -> None:
    steps = Steps()
    function = CompiledFunction(steps.compute)
    with pytest.raises(NewVariant):
        function(X)
    assert steps.layer.weight.grad is None
    loss = function.compile(X)
    expected = Steps()
    expected.layer.load_state_dict(steps.layer.state_dict())
    assert torch.allclose(loss, expected.compute(X), rtol=1e-14)
    assert torch.equal(steps.layer.weight.grad, expected.layer.weight.grad)
    # The variant is there now.
    steps.layer.zero_grad()
    function(X)


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


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, dropout: layer.register_forward_hook(lambda *args: None),
        lambda layer, dropout: layer.weight.requires_grad_(False),
        lambda layer, dropout: dropout.eval(),
    ],
    ids=["a hook", "frozen", "evaluating"],
)
def test_changes_of_modules_are_conditions(change: Callable[..., Any]) -> None:
    steps, dropout = Steps(), nn.Dropout(0.5)
    compute = steps.compute
    function = CompiledFunction(lambda x: compute(dropout(x)))
    function.compile(X)
    steps.layer.zero_grad()
    function(X)
    steps.layer.zero_grad()
    change(steps.layer, dropout)
    with pytest.raises(NewVariant):
        function(X)


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


def test_errors_of_the_computation_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(compiling, "_lower", lambda graph, inputs: fail)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        CompiledFunction(Steps().compute).compile(X)


def test_modes_are_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traced graph enters autocast, and turns off gradients, by calls of its own."""

    def fail(*args: Any) -> Any:
        torch.set_grad_enabled(False)
        torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, False)
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(compiling, "_lower", lambda graph, inputs: fail)
    modes = compiling._Modes()
    function = CompiledFunction(Steps().compute)
    with pytest.raises(torch.OutOfMemoryError):
        function.compile(X)
    assert torch.is_grad_enabled()
    with pytest.raises(torch.OutOfMemoryError):
        function(X)
    assert vars(compiling._Modes()) == vars(modes)


def test_casts_are_forgotten_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outermost autocast forgets casts of parameters at its end, which an error leaves out."""
    weight = nn.Parameter(torch.ones(2, 2))

    def fail(*args: Any) -> Any:
        torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, True)
        torch.ones(3, 2).mm(weight)
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(compiling, "_lower", lambda graph, inputs: fail)
    function = CompiledFunction(Steps().compute)
    with pytest.raises(torch.OutOfMemoryError):
        function.compile(X)
    with torch.no_grad():
        weight.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.ones(3, 2).mm(weight).any()


class Optimized(Steps):
    """A step that reads its optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.Adam(self.layer.parameters(), 0.5)

    def compute(self, x: Tensor) -> Tensor:
        loss = (self.layer(x) * self.optimizer.param_groups[0]["lr"]).sum()
        loss.backward()
        return loss.detach()


def test_an_optimiser_that_is_read_stays_as_it_is() -> None:
    """The compiler would note at the parameters that they are constants, and replace settings."""
    steps = Optimized()
    function = CompiledFunction(steps.compute)
    function.compile(X)
    assert function.leaves()
    assert steps.layer.weight.grad is not None
    assert getattr(steps.layer.weight, "_dynamo_static_input_type", None) != "guarded"
    function.restore()
    assert steps.layer.weight.grad is None
    function(X)
    steps.layer.zero_grad()
    # The number is a condition.
    steps.optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(NewVariant):
        function(X)


def test_the_compiler_has_a_class_for_optimisers() -> None:
    from torch._dynamo.variables import builder

    special = builder.OptimizerVariable
    with compiling._compiler_settings():
        assert builder.OptimizerVariable is builder.UserDefinedObjectVariable
    assert builder.OptimizerVariable is special
