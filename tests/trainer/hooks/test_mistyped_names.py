"""Methods that look like a hook and are none: told once, with the nearest right name."""

import functools
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

import equipoise
from equipoise import ConfigurationError, Trainer
from tests.support.trainer_runs import Small, loader, trainer


def fit(module: Small, *callbacks: L.Callback, datamodule: L.LightningDataModule | None = None) -> list[Any]:
    """Train, and return the warnings of hooks."""
    data = loader() if datamodule is None else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(callbacks=list(callbacks)).fit(module, data, datamodule=datamodule)
    return [each for each in caught if "no hook has that name" in str(each.message)]


def mistyped() -> type[Small]:
    """Make a class that is new: a method is warned of once."""

    class Mistyped(Small):
        def on_training_epoch_end(self):
            raise AssertionError("is never called")

    return Mistyped


class MistypedCallback(equipoise.Callback):
    def on_trian_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        raise AssertionError("is never called")


class MistypedData(L.LightningDataModule):
    def train_dataloader(self):
        return loader()

    def on_exceptoin(self, exception):
        raise AssertionError("is never called")


def test_a_mistyped_hook_of_a_module():
    kind = mistyped()
    (found,) = fit(kind())
    assert "`Mistyped.on_training_epoch_end` is called by no trainer" in str(found.message)
    assert "did you mean `on_train_epoch_end`?" in str(found.message)
    assert "ignore this warning, or let the name begin with an underscore" in str(found.message)
    method = next(value for name, value in vars(kind).items() if name.startswith("on_"))  # a name here is a use
    assert (found.filename, found.lineno) == (__file__, method.__code__.co_firstlineno)


def test_a_script_that_an_installed_program_runs(monkeypatch):
    """Its classes are in `__main__`, whose file is that of the program."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/lib/site-packages/runner/worker.py", raising=False)
    kind = mistyped()
    monkeypatch.setattr(kind, "__module__", "__main__")
    assert len(fit(kind())) == 1


def test_a_mistyped_step():
    class Mistyped(Small):
        def validaton_step(self, batch, batch_idx):
            raise AssertionError("is never called")

        def train_step(self, batch):
            """Similar to `training_step`, but a name of the user's own."""

    (found,) = fit(Mistyped())
    assert "`Mistyped.validaton_step` is called by no trainer" in str(found.message)
    assert "did you mean `validation_step`?" in str(found.message)


def test_a_mistyped_hook_of_a_callback_and_of_data():
    first, second = fit(Small(), MistypedCallback(), datamodule=MistypedData())
    assert "did you mean `on_exception`?" in str(first.message)
    assert "did you mean `on_train_batch_end`?" in str(second.message)


def test_a_method_is_warned_of_once():
    kind = mistyped()
    assert [len(fit(kind())) for _ in range(3)] == [1, 0, 0]


class Heir(mistyped()):  # type: ignore[misc]
    """Inherits it."""


class Decorated(Small):
    @torch.no_grad()
    def on_training_epoch_end(self):
        raise AssertionError("is never called")


class NoFunction(Small):
    on_training_epoch_end = torch.no_grad()(functools.partial(print))


@pytest.mark.parametrize("kind", [Heir, Decorated, NoFunction])
def test_a_mistyped_hook_that_is_inherited_or_decorated(kind):
    (found,) = fit(type(kind.__name__, (kind,), {})())  # of a class that is new
    assert f"`{kind.__name__}.on_training_epoch_end`" in str(found.message)


class CallsItself(Small):
    def on_training_epoch_end(self):
        """Called by this class."""

    def on_train_epoch_end(self):
        self.on_training_epoch_end()


class CalledByACallback(Small):
    def on_train_epoch_ended(self):
        """Called by the callback below."""


class Caller(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.on_train_epoch_ended()


class CalledByName(Small):
    def on_train_epoch_ended(self):
        """Called by a function of this file."""


def call_by_name(module: Any) -> None:
    getattr(module, "on_train_epoch_" + "ended", None)
    getattr(module, "on_train_epoch_ended", None)


class OfItsOwn(Small):
    def on_new_best_score(self):
        """Resembles no hook."""

    def _on_training_epoch_end(self):
        """Is private."""


def on_trainstart(self):
    """Is a hook under the name that the class below gives it."""


class OtherName(Small):
    on_train_start = on_trainstart


class Partial(Small):
    helper = torch.no_grad()(functools.partial(print))


class NewHooks(equipoise.Callback):
    def on_out_of_memory(self, trainer, pl_module, event):
        return None

    def on_before_batch_to_device(self, trainer, pl_module, batch_idx):
        """Is one of ours."""

    def on_configure_model_end(self, trainer, pl_module):
        """Is another."""


@pytest.mark.parametrize(
    ("module", "callbacks"),
    [
        (CallsItself, []),
        (CalledByACallback, [Caller]),
        (CalledByName, []),
        (OfItsOwn, []),
        (OtherName, []),
        (Partial, []),
        (Small, [NewHooks]),
        (Small, [L.callbacks.ModelCheckpoint, L.callbacks.EarlyStopping]),
    ],
)
def test_a_method_of_ones_own_is_left_alone(module, callbacks, tmp_path: Path):
    made = []
    for kind in callbacks:
        options = {"monitor": "x", "strict": False} if kind is L.callbacks.EarlyStopping else {}
        options = {"dirpath": tmp_path} if kind is L.callbacks.ModelCheckpoint else options
        made.append(kind(**options))
    run = trainer(callbacks=made, enable_checkpointing=True, default_root_dir=tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module(), loader())
    assert not [each for each in caught if "no hook has that name" in str(each.message)]


# Arguments of the trainer.


@pytest.mark.parametrize("error", [TypeError, ConfigurationError])
def test_a_mistyped_argument(error: type[Exception]):
    with pytest.raises(error, match=r"^Trainer takes no argument 'max_epoch'; did you mean 'max_epochs'\?$"):
        Trainer(max_epoch=3)


def test_an_argument_that_resembles_none():
    with pytest.raises(TypeError, match=r"^Trainer takes no argument 'zzz'; there are: accelerator, strategy, "):
        Trainer(zzz=3)


def test_an_heir_hands_arguments_on():
    class Heir(Trainer):
        def __init__(self, extra: int, **options: Any) -> None:
            super().__init__(**options)
            self.extra = extra

    assert Heir(3, accelerator="cpu", max_epochs=1).max_epochs == 1
    with pytest.raises(TypeError, match=r"^Heir takes no argument 'max_epoch'; did you mean"):
        Heir(3, max_epoch=1)
