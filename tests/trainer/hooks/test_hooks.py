"""Overrides of a hook are called, however they are written. `tests/parity` has the order."""

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, Timer
from lightning.pytorch.profilers import PassThroughProfiler

from equipoise import Callback, Trainer
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.state.run_state import RunState
from tests.support.trainer_runs import Small, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore:You have overridden `on_.*_batch_transfer` in")
BOTH = pytest.mark.parametrize("cls", [L.Trainer, Trainer], ids=["lightning", "ours"])
Note = Callable[..., Any]


class TrainingData(L.LightningDataModule):
    """A loader for the training alone."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Any:
        return loader(self.batches)


# The ways to override a hook: each gives `owner` a hook that calls `note` with its arguments.


def by_class(owner: Any, name: str, note: Note) -> None:
    owner.__class__ = type("Own", (type(owner),), {name: lambda self, *args, **kwargs: note(*args, **kwargs)})


def by_attribute(owner: Any, name: str, note: Note) -> None:
    setattr(owner, name, lambda *args, **kwargs: note(*args, **kwargs))


def by_staticmethod(owner: Any, name: str, note: Note) -> None:
    owner.__class__ = type("Own", (type(owner),), {name: staticmethod(note)})


def by_wrapper_on_the_class(owner: Any, name: str, note: Note) -> None:
    @functools.wraps(getattr(type(owner), name))
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return note(*args, **kwargs)

    owner.__class__ = type("Own", (type(owner),), {name: wrapped})


def by_wrapper_on_the_instance(owner: Any, name: str, note: Note) -> None:
    setattr(owner, name, functools.wraps(getattr(owner, name))(lambda *args, **kwargs: note(*args, **kwargs)))


def by_partial(owner: Any, name: str, note: Note) -> None:
    setattr(owner, name, functools.partial(note))


def by_mock(owner: Any, name: str, note: Note) -> None:
    setattr(owner, name, Mock(side_effect=note))


def by_mock_around_the_original(owner: Any, name: str, note: Note) -> None:
    setattr(owner, name, Mock(wraps=getattr(owner, name), side_effect=note))


WAYS = [
    by_class,
    by_attribute,
    by_staticmethod,
    by_wrapper_on_the_class,
    by_wrapper_on_the_instance,
    by_partial,
    by_mock,
    by_mock_around_the_original,
]
EVERY_WAY = pytest.mark.parametrize("override", WAYS, ids=lambda way: way.__name__)


@pytest.mark.parametrize("value", [None, 3], ids=str)
def test_what_cannot_be_called_is_no_override(value: Any) -> None:
    module = Small()
    module.on_train_start = value
    trainer().fit(module, loader(1))
    assert module.ran == ["training"]


@EVERY_WAY
@BOTH
def test_hooks_of_every_owner_are_called(cls: Any, override: Any) -> None:
    module, callback, datamodule, notes = Small(), L.Callback(), TrainingData(2), []
    run = trainer(cls, callbacks=[callback])
    override(datamodule, "setup", lambda stage: notes.append(("setup", stage)))
    override(datamodule, "teardown", lambda stage: notes.append(("teardown", stage)))
    override(callback, "on_fit_start", lambda *args: notes.append(args == (run, module)))
    override(callback, "on_train_batch_start", lambda trainer, module, batch, batch_idx: notes.append(batch_idx))
    override(module, "on_train_start", lambda: notes.append("start"))
    override(module, "on_before_zero_grad", lambda optimizer: notes.append(type(optimizer).__name__))
    override(module, "on_train_batch_end", lambda outputs, batch, batch_idx: notes.append(f"end of {batch_idx}"))
    run.fit(module, datamodule=datamodule)
    steps = [0, "SGD", "end of 0", 1, "SGD", "end of 1"]
    assert notes == [("setup", "fit"), True, "start", *steps, ("teardown", "fit")]


@EVERY_WAY
@pytest.mark.parametrize("kind", ["module", "data module"])
def test_transfer_hooks_are_called(kind: str, override: Any) -> None:
    """Not compared: Lightning passes over those that are wrapped or mocks."""
    module, datamodule, notes = Small(), TrainingData(2), []
    owner = module if kind == "module" else datamodule
    override(owner, "on_before_batch_transfer", lambda batch, index: notes.append("before") or batch)
    override(owner, "transfer_batch_to_device", lambda batch, device, index: notes.append(device.type) or batch)
    override(owner, "on_after_batch_transfer", lambda batch, index: notes.append("after") or batch)
    trainer().fit(module, datamodule=datamodule)
    assert notes == ["before", "cpu", "after"] * 2


@BOTH
def test_a_data_modules_transfer_hook_replaces_the_modules(cls: Any) -> None:
    module, datamodule, notes = Small(), TrainingData(1), []
    for owner, name in ((module, "module"), (datamodule, "data module")):
        by_class(owner, "on_before_batch_transfer", lambda batch, index, name=name: notes.append(name) or batch)
    by_class(module, "on_after_batch_transfer", lambda batch, index: notes.append("after") or batch)
    trainer(cls).fit(module, datamodule=datamodule)
    assert notes == ["data module", "after"]


# Steps


@pytest.mark.parametrize(
    "step",
    [
        lambda self, batch: self.layer(batch[0]).sum(),
        lambda self, batch, batch_idx: self.layer(batch[0]).sum() + batch_idx,
        lambda self, batch, *rest: self.layer(batch[0]).sum() + rest[0],
        lambda self, batch, **rest: self.layer(batch[0]).sum(),
    ],
    ids=["a batch alone", "a batch and its index", "more", "names"],
)
def test_signatures_of_steps(step: Any) -> None:
    weights = []
    for cls in (L.Trainer, Trainer):
        module = type("Module", (Small,), {"training_step": step})()
        module.layer.weight.data.fill_(0.5)
        trainer(cls).fit(module, loader(2))
        weights.append(module.layer.weight.tolist())
    assert weights[0] == weights[1]
    assert weights[0] != [[0.5, 0.5]]


# Some of the callbacks


class Joint(Callback):
    """A callback that acts together with those of other processes."""

    fires_without_batch = True


def test_callbacks_that_act_together_over_processes() -> None:
    callbacks: list[Any] = [L.Callback(), Checkpoint(), Timer(), Joint(), EarlyStopping("loss")]
    names: list[str] = []
    for callback in callbacks:
        by_attribute(callback, "on_train_batch_end", lambda *args, who=callback: names.append(type(who).__name__))
    state = RunState(callbacks=callbacks, profiler=PassThroughProfiler())
    hooks = Hooks(trainer=None, state=state, module=Small(), datamodule=None, strategy_name="ddp")
    fire = hooks.bind_deciders("on_train_batch_end")
    assert fire is not None
    fire()
    assert names == ["Checkpoint", "Timer", "Joint"]


class Collects(Callback):
    """One that needs no outputs, as a base for others."""

    uses_outputs = False

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)


class OwnHook(Collects):
    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)


class OwnHookAndWord(OwnHook):
    uses_outputs = False


class Heir(Collects): ...


@pytest.mark.parametrize(("cls", "uses"), [(Collects, False), (Heir, False), (OwnHook, True), (OwnHookAndWord, False)])
def test_outputs_that_no_hook_uses_are_not_prepared(cls: type[Collects], uses: bool) -> None:
    """A class says for its own hook whether it uses them: the flag is not for the hook of a derived class."""
    callback = cls()
    trainer(callbacks=[callback]).fit(Small(), loader(2))
    assert [set(outputs) for outputs in callback.outputs] == [{"loss"} if uses else set()] * 2
    # Hooks of a module, and of an instance, use them.
    overriding = Small()
    for owner, module in ((overriding, overriding), (callback, Small())):
        seen: list[Any] = []
        by_attribute(owner, "on_train_batch_end", lambda *args, s=seen: s.append(args[-3]))
        trainer(callbacks=[callback]).fit(module, loader(2))
        assert [set(outputs) for outputs in seen] == [{"loss"}] * 2


@BOTH
def test_outputs_of_a_step_by_hand_are_what_it_returned_without_the_graph(cls: Any) -> None:
    class ByHand(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "index": batch_idx}

        def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
            self.seen.append((outputs["index"], outputs["loss"].requires_grad))

    module = ByHand()
    trainer(cls).fit(module, loader(2))
    assert module.seen == [(0, False), (1, False)]


@BOTH
def test_a_callback_that_comes_between_epochs_is_called_from_then_on(cls: Any) -> None:
    late, epochs = L.Callback(), []
    by_class(late, "on_train_batch_end", lambda trainer, *args: epochs.append(trainer.current_epoch))

    class Module(Small):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.callbacks.append(late)

    trainer(cls, max_epochs=3).fit(Module(), loader(2))
    assert epochs == [1, 1, 2, 2]


# What the module is told


@BOTH
def test_a_hook_within_a_hook(cls: Any, tmp_path: Any) -> None:
    seen = []

    class Module(Small):
        def on_train_start(self) -> None:
            seen.append(self._current_fx_name)
            self.trainer.save_checkpoint(tmp_path / "x.ckpt")
            seen.append(self._current_fx_name)

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            seen.append(self._current_fx_name)

    module = Module()
    trainer(cls).fit(module, loader(1))
    assert seen == ["on_train_start", "on_save_checkpoint", "on_train_start"]
    assert module._current_fx_name is None


@pytest.mark.parametrize("hook", ["setup", "on_train_batch_end"])
def test_no_hook_is_running_after_an_error(hook: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ArithmeticError(hook)

    module = Small()
    by_attribute(module, hook, fail)
    with pytest.raises(ArithmeticError, match=hook):
        trainer().fit(module, loader(1))
    assert module._current_fx_name is None
