"""`self.log` of a module and its callbacks is ours in a run, and only there."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import lightning as L
import pytest
import torch
from lightning.pytorch import LightningModule

from tests.support.trainer_runs import Small, loader, trainer


def is_bound(owner: Any) -> bool:
    return "log" in vars(owner)


class Watching(Small):
    """Calls `during(module)` in its second training step."""

    def __init__(self, during: Callable[[Any], Any] = lambda module: None) -> None:
        super().__init__()
        self.during = during

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.seen = self.during(self)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "during": None}


def test_log_is_bound_in_a_run_and_gone_after_it() -> None:
    module = Watching(is_bound)
    trainer().fit(module, loader())
    assert module.seen
    assert not is_bound(module)
    assert module.log.__func__ is LightningModule.log


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("setup", ValueError),
        ("training_step", SystemExit),
        ("on_train_end", KeyboardInterrupt),
    ],
)
def test_log_is_gone_after_an_error(hook: str, error: type[BaseException]) -> None:
    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        assert is_bound(self)
        raise error

    module = type("Module", (Small,), {hook: fail})()
    callback = L.Callback()
    with pytest.raises(error):
        trainer(callbacks=[callback]).fit(module, loader())
    assert not is_bound(module)
    assert not is_bound(callback)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(cloudpickle.dumps(module))])
def test_a_module_is_copied_in_the_course_of_a_run(copied: Callable[[Any], Any]) -> None:
    module = Watching(copied)
    trainer(max_steps=2).fit(module, loader())
    other = module.seen
    assert type(other) is Watching
    assert other._trainer is None
    assert other.log.__self__ is other
    with pytest.warns(UserWarning, match="reference is not"):
        other.log("loss", 1.0)
    other.during = lambda module: None
    run = trainer()
    run.fit(other, loader())  # a run of its own
    assert other.ran[-3:] == ["training"] * 3
    assert "loss" in run.callback_metrics
    assert not is_bound(other)
    assert not is_bound(module)


@pytest.mark.parametrize("kind", ["class", "instance"])
def test_a_log_of_the_users_own_is_kept(kind: str) -> None:
    names = []

    def log(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        names.append(name)
        LightningModule.log(self, name, *args, **kwargs)

    if kind == "class":
        module = type("Module", (Small,), {"log": log})()
    else:
        module = Small()
        module.log = log.__get__(module)
    before = module.log
    run = trainer()
    run.fit(module, loader())
    assert names == ["loss"] * 3
    assert "loss" in run.callback_metrics
    assert module.log == before
    assert is_bound(module) == (kind == "instance")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the compiler's own making
def test_a_compiled_module_logs() -> None:
    module = Small()
    assert module._compiler_ctx is None
    compiled = torch.compile(module, backend="eager")
    run = trainer(max_steps=2)
    run.fit(compiled, loader())
    assert "loss" in run.callback_metrics
    assert run.lightning_module._compiler_ctx is not None
    assert not is_bound(run.lightning_module)
