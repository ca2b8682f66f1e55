"""A step of an optimiser without torch's record does what the optimiser's step does."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from equipoise.interop.torch import optimizers
from equipoise.interop.torch.optimizers import has_step_hooks, has_step_pre_hooks, plain_step


@pytest.fixture
def parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    parameter.grad = torch.tensor([0.5, 2.0], dtype=torch.float64)
    return parameter


def test_a_profiler_finds_the_record(parameter: nn.Parameter) -> None:
    step = plain_step(SGD([parameter], lr=0.1))
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    assert [event.key for event in profiler.key_averages() if "Optimizer" in event.key] == ["Optimizer.step#SGD.step"]


def test_hooks_that_are_registered_later_are_called(parameter: nn.Parameter) -> None:
    optimizer = SGD([parameter], lr=0.1)
    step = plain_step(optimizer)
    seen: list[str] = []

    def note(name: str) -> Any:
        return lambda *arguments: seen.append(name)

    for register, name in (
        (optimizer.register_step_pre_hook, "before"),
        (optimizer.register_step_post_hook, "after"),
        (register_optimizer_step_pre_hook, "before each"),
        (register_optimizer_step_post_hook, "after each"),
    ):
        handle = register(note(name))
        step()
        handle.remove()
        step()
    assert seen == ["before", "after", "before each", "after each"]


def test_a_replaced_step_is_called(parameter: nn.Parameter, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SGD([parameter], lr=0.1)
    step = plain_step(optimizer)
    calls: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "step", lambda: calls.append("of the object"))
        step()
    # Older versions of pytest leave what was there before as an attribute of the object.
    vars(optimizer).pop("step", None)
    with monkeypatch.context() as patch:
        patch.setattr(SGD, "step", lambda optimizer: calls.append("of the class"))
        step()
        plain_step(optimizer)()
    assert calls == ["of the object", "of the class", "of the class"]


def test_hooks_that_torch_does_not_show_may_be_there(parameter: nn.Parameter, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SGD([parameter], lr=0.1)
    assert not has_step_pre_hooks(optimizer)
    assert not has_step_hooks(optimizer)
    monkeypatch.setattr(optimizers, "_PRE_HOOKS", "gone")
    assert has_step_pre_hooks(optimizer)
    assert has_step_hooks(optimizer)
    assert plain_step(optimizer) == optimizer.step
