"""Private names of Lightning, torchmetrics and torch still do what we use them for.

Each test stands for a name in `equipoise/interop`. An upgrade of one of the three packages shows here what has changed.
"""

import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD
from torchmetrics import CatMetric

from equipoise.interop.lightning.callbacks import cannot_fire, load_saving_states, saving_states
from equipoise.interop.lightning.modules import pretend_device
from equipoise.interop.lightning.optimizers import no_closure, wrap_optimizer
from equipoise.interop.lightning.self_log import LogOptions, bind_log
from equipoise.interop.metrics import load_metric_states, metric_states
from tests.support.trainer_runs import Small, loader, trainer

# self.log


def test_the_arguments_of_log_are_lightnings() -> None:
    ours = inspect.signature(vars(bound())["log"]).parameters
    theirs = inspect.signature(LightningModule().log).parameters
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]
    assert set(LogOptions._fields) < set(theirs)
    assert all(theirs[name].default == default for name, default in LogOptions._field_defaults.items())


def bound(module: LightningModule | None = None) -> LightningModule:
    module = Small() if module is None else module
    bind_log(module, [])
    return module


# Metrics


def test_states_of_metrics_come_back_to_where_the_metric_is() -> None:
    """The meta device is the only other one that every machine has."""
    module = nn.ModuleDict({"metric": CatMetric()})
    module["metric"].update(torch.ones(1))
    states = metric_states(module)
    load_metric_states(module.to("meta"), states)
    assert [tensor.device.type for tensor in module["metric"].value] == ["meta"]


def test_states_of_metrics_that_are_gone_are_passed_over() -> None:
    module = nn.Module()
    load_metric_states(module, {"gone": {"state": {}, "count": 1}})
    module.gone = nn.Linear(1, 1)
    load_metric_states(module, {"gone": {"state": {}, "count": 1}})


# Callbacks and checkpoints


class OwnCheckpoint(ModelCheckpoint):
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("callback", "idle"),
    [
        (ModelCheckpoint(), True),
        (ModelCheckpoint(every_n_epochs=2), True),
        (ModelCheckpoint(every_n_train_steps=3), False),
        (ModelCheckpoint(train_time_interval=timedelta(minutes=1)), False),
        (OwnCheckpoint(), False),
        (L.Callback(), False),
    ],
    ids=["default", "epochs", "steps", "time", "subclass", "another"],
)
def test_a_checkpoint_callback_that_has_nothing_to_do_in_a_batch(callback: Any, idle: bool) -> None:
    assert cannot_fire(callback, "on_train_batch_end") == idle
    assert not cannot_fire(callback, "on_train_epoch_end")


def test_what_a_checkpoint_callback_knows_of_its_last_file(tmp_path: Path) -> None:
    """Its own state leaves out the step, the file and a save that waits; without them it saves a step again."""
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    seen: list[Any] = []

    class Look(L.Callback):
        def on_save_checkpoint(self, run: Any, module: Any, checkpoint: Any) -> None:
            path = saver.best_model_path
            seen.append(saving_states([saver], saver, path, run.global_step)[saver.state_key])

    run = trainer(callbacks=[Look(), saver], enable_checkpointing=True)
    run.fit(Small(), loader())
    after = saving_states([saver, Look()], None, None, 99)
    assert seen == [after[saver.state_key]]
    assert seen[0]["last_global_step_saved"] == 2
    assert seen[0]["last_checkpoint_saved"] == saver.best_model_path
    noted = {"last_global_step_saved", "last_checkpoint_saved", "defer_save_until_validation"}
    assert set(seen[0]) == {"dirpath"} | noted

    # A save that had waited for the validation waits no more once the file is read.
    saver._defer_save_until_validation = True
    for hook, waits in (("on_validation_end", False), ("on_train_batch_end", True)):
        states = saving_states([saver], saver, saver.best_model_path, 2, hook)
        assert states[saver.state_key]["defer_save_until_validation"] == waits
    saver._defer_save_until_validation = False

    def taken_back(folder: Path) -> dict[str, Any]:
        other = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
        load_saving_states([Look(), other], after)
        return saving_states([other], None, None, 0)[other.state_key]

    assert taken_back(tmp_path) == after[saver.state_key]
    assert taken_back(tmp_path / "elsewhere")["last_global_step_saved"] == 0


# Modules and optimisers


def test_the_device_is_known_before_the_module_is_there() -> None:
    module = Small()
    module.inner = Small()
    pretend_device(module, torch.device("meta"))
    assert module.device == module.inner.device == torch.device("meta")
    assert module.layer.weight.device == torch.device("cpu")
    module.to("cpu")
    assert module.device == module.inner.device == torch.device("cpu")


class Recording:
    """A strategy that writes down what a LightningOptimizer asks of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def optimizer_step(self, optimizer: Any, closure: Any, **kwargs: Any) -> str:
        self.asked.append((optimizer, closure, kwargs))
        return "answer"


def test_optimisers_that_the_user_sees() -> None:
    optimizer, strategy = SGD(Small().parameters(), lr=0.1), Recording()
    wrapped = wrap_optimizer(optimizer, strategy)
    assert isinstance(wrapped, (LightningOptimizer, SGD))
    assert wrapped.optimizer is optimizer
    assert wrap_optimizer(wrapped, strategy).optimizer is optimizer
    closure = lambda: None  # noqa: E731
    assert wrapped.step() == "answer"
    assert wrapped.step(closure, extra=1) == "answer"
    assert strategy.asked == [(optimizer, no_closure, {}), (optimizer, closure, {"extra": 1})]
    with pytest.raises(MisconfigurationException, match="takes a function, not 1"):
        wrapped.step(1)


def test_gradients_of_one_optimiser_alone() -> None:
    seen = []

    class Module(Small):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(2, 1)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            with self.optimizers()[1].toggle_model(sync_grad=False):
                seen.append([parameter.requires_grad for parameter in self.parameters()])
            seen.append([parameter.requires_grad for parameter in self.parameters()])

        def configure_optimizers(self) -> Any:
            return [SGD(layer.parameters(), lr=0.1) for layer in (self.layer, self.other)]

    trainer(max_steps=1, limit_train_batches=1).fit(Module(), loader())
    assert seen == [[False, False, True, True], [True] * 4]


# Loaders
