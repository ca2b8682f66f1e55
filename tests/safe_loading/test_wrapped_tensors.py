"""Tensors that wrap others, in which libraries such as torchao keep an optimiser's state of few bits."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from equipoise import CheckpointError
from equipoise.safe_loading.stand_in import StandIn
from equipoise.trainer.checkpointing.file_reading import read_checkpoint
from tests.support.rounded_tensors import Rounded
from tests.support.trainer_runs import Small, loader, trainer, with_optimizers


class RoundedMomentum(Optimizer):
    """Gradient descent with a momentum that is rounded."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            before = state["momentum"].codes.to(parameter.dtype) if state else torch.zeros_like(parameter)
            momentum = before * 0.9 + parameter.grad
            state["momentum"] = Rounded(momentum.to(torch.bfloat16), parameter.dtype)
            parameter -= self.param_groups[0]["lr"] * momentum
        return loss


def module() -> Small:
    torch.manual_seed(4)
    return with_optimizers(lambda m: RoundedMomentum(m.parameters()))


@pytest.fixture
def allowed() -> Any:
    """The class is allowed as torchao allows its own when it is imported."""
    with torch.serialization.safe_globals([Rounded]):
        yield


@pytest.mark.usefixtures("allowed")
def test_a_run_with_a_wrapped_state_goes_on_to_the_bit(tmp_path: Path) -> None:
    expected = module()
    trainer(max_epochs=2).fit(expected, loader())
    first = trainer(max_epochs=1)
    first.fit(module(), loader())
    first.save_checkpoint(tmp_path / "x.ckpt")
    actual = module()
    run = trainer(max_epochs=2)
    run.fit(actual, loader(), ckpt_path=tmp_path / "x.ckpt")
    for name, value in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[name], value), name
    (state, *_) = run.optimizers[0].state.values()
    assert type(state["momentum"]) is Rounded


def test_a_class_that_nobody_has_allowed_is_told_early(tmp_path: Path) -> None:
    run = trainer(max_epochs=1)
    run.fit(module(), loader())
    name = re.escape(f"{Rounded.__module__}.Rounded")
    with pytest.warns(UserWarning, match=rf"'optimizer_states'\[0\].*{name}.*add_safe_globals"):
        run.save_checkpoint(tmp_path / "x.ckpt")
    states = read_checkpoint(tmp_path / "x.ckpt")["optimizer_states"][0]["state"]
    assert isinstance(states[0]["momentum"], StandIn)


class Pretended:
    """Writes what a wrapped tensor would be, with a class or sizes that are none."""

    def __init__(self, kind: Any, size: Any = (2,), dtype: Any = torch.float32) -> None:
        self.arguments = (kind, dtype, size, (1,), 0, torch.strided, torch.device("cpu"), False)

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_wrapper_subclass, self.arguments


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("pretended", "message"),
    [
        (Pretended(dict), "cannot be of <class 'dict'>"),
        (Pretended(Rounded, (-1,)), "non-negative integers"),
        (Pretended(Rounded, dtype=1), "has the dtype 1"),
    ],
    ids=["class", "size", "dtype"],
)
def test_what_is_no_wrapped_tensor_is_refused(pretended: Pretended, message: str, tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "mine": pretended}, tmp_path / "x.ckpt", pickle_module=pickle)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path / "x.ckpt")
