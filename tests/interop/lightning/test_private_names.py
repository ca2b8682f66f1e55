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
from torchmetrics import CatMetric, SumMetric

from equipoise.interop.lightning.callbacks import cannot_fire
from equipoise.interop.lightning.modules import pretend_device
from equipoise.interop.lightning.optimizers import no_closure, wrap_optimizer
from equipoise.interop.lightning.self_log import bind_log
from equipoise.interop.metrics import load_metric_states, metric_states
from tests.support.trainer_runs import Small, loader, trainer

# self.log


def test_the_arguments_of_log_are_lightnings() -> None:
    ours = inspect.signature(vars(bound())["log"]).parameters
    theirs = inspect.signature(LightningModule().log).parameters
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


def bound(module: LightningModule | None = None) -> LightningModule:
    module = Small() if module is None else module
    bind_log(module, [])
    return module


# Metrics


def test_states_of_metrics_are_copies_on_the_device_of_the_metric() -> None:
    """The meta device is the only other one that every machine has."""
    module = nn.ModuleDict({"list": CatMetric(), "sum": SumMetric()})
    for metric in module.values():
        metric.update(torch.ones(1))
    states = metric_states(module)
    module["sum"].update(100.0)
    load_metric_states(module, states)
    assert module["sum"].compute() == 1
    load_metric_states(module.to("meta"), states)
    assert [tensor.device.type for tensor in module["list"].value] == ["meta"]


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
def test_a_checkpoint_callback_that_has_nothing_to_do_in_a_batch(callback: Any, idle: bool, tmp_path: Path) -> None:
    saved = []

    class Looks(Small):
        def on_train_epoch_end(self) -> None:
            saved.append(any(tmp_path.rglob("*.ckpt")))

    assert cannot_fire(callback, "on_train_batch_end") == idle
    assert not cannot_fire(callback, "on_train_epoch_end")
    if idle:
        options = {"callbacks": [callback], "enable_checkpointing": True, "default_root_dir": tmp_path}
        trainer(L.Trainer, **options).fit(Looks(), loader(3))
        assert saved == [False]


def test_a_resumed_run_does_not_save_a_step_again(tmp_path: Path) -> None:
    """In the next batch of an accumulation window the step is that of the file."""

    def fit(**options: Any) -> None:
        saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
        run = trainer(callbacks=[saver], enable_checkpointing=True, accumulate_grad_batches=2)
        run.fit(Small(), loader(6), **options)

    fit()
    (saved,) = tmp_path.iterdir()
    content = saved.read_bytes()
    fit(ckpt_path=saved)
    assert saved.read_bytes() == content


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
