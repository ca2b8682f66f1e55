"""A module, optimisers or data that cannot work are refused in one message, before a training step runs."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from equipoise.errors import ConfigurationRuntimeError
from tests.support.trainer_runs import (
    Data,
    Small,
    Stream,
    Validated,
    loader,
    refuses,
    refuses_fit,
    trainer,
    with_optimizers,
)

NOTHING = TensorDataset(torch.empty(0, 2))


def sgd(module: nn.Module) -> SGD:
    return SGD(module.parameters(), lr=0.1)


def scheduled(module: nn.Module, scheduler: Callable[[SGD], Any] = lambda o: StepLR(o, 1), **config: Any) -> Any:
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler(optimizer), **config}}


# The module


def nothing(self: Any, *args: Any, **kwargs: Any) -> None: ...


NO_STEP: dict[str, tuple[list[str], list[str]]] = {
    "no training step": (["configure_optimizers"], ["`fit` needs `training_step`", "`training_step`. Define it"]),
    "a mistyped one": (["trainig_step", "configure_optimizers"], ["`training_step`. Rename `trainig_step`"]),
    "no optimiser": (["training_step"], ["Module does not define `configure_optimizers`", "Define it"]),
}


@pytest.mark.parametrize("name", NO_STEP)
def test_a_method_that_is_missing(name: str) -> None:
    methods, parts = NO_STEP[name]
    refuses_fit(type("Module", (L.LightningModule,), dict.fromkeys(methods, nothing))(), *parts)


@pytest.mark.parametrize(
    ("entry", "step"), [("validate", "validation_step"), ("test", "test_step"), ("predict", "predict_step")]
)
def test_no_evaluation_step(entry: str, step: str) -> None:
    call = getattr(trainer(), entry)
    refuses(lambda: call(L.LightningModule(), loader()), f"`{entry}`", f"`{step}`", "LightningModule", "Define")


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (nn.Linear(2, 1), ["LightningModule", "torch.nn.modules.linear.Linear"]),
        ("resnet", ["LightningModule", "builtins.str"]),
        (loader(), ["LightningModule", "DataLoader"]),
        (Small, ["not a class", "`Small(...)`"]),
        (None, ["needs a module", "none was passed", "no run before"]),
    ],
    ids=["nn.Module", "str", "loader", "class", "None"],
)
def test_not_a_lightning_module(model: Any, parts: list[str]) -> None:
    refuses_fit(model, *parts)


IN_TURN = ["`Module.training_step`", "`optimizer_idx`", "GAN", "self.automatic_optimization = False"]
PULLS = [
    "`Module.training_step(dataloader_iter)`",
    "`training_step(self, batch, batch_idx)`",
    "accumulate_grad_batches",
]
WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"training_epoch_end": nothing}, ["`Module.training_epoch_end`", "Lightning 1.x", "Use `on_train_epoch_end`"]),
    ({"validation_epoch_end": nothing}, ["Lightning 1.x", "Use `on_validation_epoch_end`"]),
    ({"test_epoch_end": nothing}, ["Lightning 1.x", "Use `on_test_epoch_end`"]),
    ({"training_step": lambda self, batch, batch_idx, optimizer_idx: None}, IN_TURN),
    ({"training_step": lambda self, batch, batch_idx, optimizer_idx=None: None}, IN_TURN),
    ({"training_step": lambda self, batch, batch_idx, other: None}, ["`Module.training_step`", "(self, batch, batch"]),
    ({"training_step": lambda self: None}, ["`Module.training_step`", "(self, batch, batch_idx)"]),
    ({"training_step": lambda self, dataloader_iter: None}, PULLS),
    ({"training_step": lambda self, dataloader_iter, batch_idx: None}, PULLS),
    ({"configure_callbacks": lambda self: [EarlyStopping]}, ["the class EarlyStopping", "EarlyStopping(...)"]),
]


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_evaluation_steps_that_pull_their_batches(entry: str) -> None:
    step = "validation_step" if entry == "validate" else f"{entry}_step"
    module = type("Module", (Small,), {step: lambda self, dataloader_iter: None})()
    call = getattr(trainer(), entry)
    refuses(lambda: call(module, loader()), f"`Module.{step}(dataloader_iter)`", f"`{step}(self, batch, batch_idx)`")


@pytest.mark.parametrize(("methods", "parts"), WRONG)
def test_a_method_that_is_wrong(methods: dict[str, Any], parts: list[str]) -> None:
    refuses_fit(type("Module", (Small,), methods)(), *parts)


@pytest.mark.parametrize("step", ["validation_step", "on_validation_batch_start", "on_validation_batch_end"])
@pytest.mark.parametrize("several", [False, True], ids=["one loader", "several loaders"])
def test_arguments_of_evaluation(step: str, several: bool) -> None:
    methods: dict[str, Any] = {
        "validation_step": (lambda self, batch, batch_idx, dataloader_idx: None),
        "on_validation_batch_start": (lambda self, batch, batch_idx, dataloader_idx: None),
        "on_validation_batch_end": (lambda self, outputs, batch, batch_idx, dataloader_idx: None),
    }
    if several:
        methods = {
            "validation_step": (lambda self, batch, batch_idx: None),
            "on_validation_batch_start": (lambda self, batch, batch_idx: None),
            "on_validation_batch_end": (lambda self, outputs, batch, batch_idx: None),
        }
    module = type("Module", (Validated,), {step: methods[step]})()
    data = (loader(), [loader(), loader()] if several else loader())
    remedy = "`dataloader_idx=0`" if not several else "Add `dataloader_idx=0`"
    # Lightning raises a RuntimeError.
    refuses(lambda: trainer().fit(module, *data), f"`Module.{step}`", remedy, error=ConfigurationRuntimeError)


def test_arguments_of_prediction() -> None:
    module = type("Module", (Small,), {"predict_step": lambda self, batch, batch_idx: None})()
    refuses(lambda: trainer().predict(module, [loader(), loader()]), "`Module.predict_step`", "Add `dataloader_idx=0`")


# Optimisers and schedulers

NO_OPTIMIZER: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a name": (lambda m: "adam", "'adam' of type str"),
    "a number": (lambda m: 0.1, "0.1 of type float"),
    "the class": (lambda m: SGD, "the class SGD"),
    "parameters": (lambda m: list(m.parameters()), "a list of Parameter, Parameter"),
    "a module": (lambda m: m, "something of type Module"),
    "a method": (lambda m: m.configure_optimizers, "something of type method"),
    "an empty list": (lambda m: [], "an empty list"),
    "an empty tuple": (lambda m: (), "an empty tuple"),
    "an empty dictionary": (lambda m: {}, "keys []"),
    "two empty lists": (lambda m: ([], []), "a tuple of list, list"),
    "a mistyped key": (lambda m: {"optimiser": sgd(m)}, "keys ['optimiser']"),
    "a dictionary with None": (lambda m: {"optimizer": None}, "under 'optimizer' is None"),
    "a dictionary with a name": (lambda m: {"optimizer": "adam"}, "'adam' of type str"),
    "a dictionary of schedulers": (lambda m: {"lr_scheduler": StepLR(sgd(m), 1)}, "no 'optimizer'"),
    "None among others": (lambda m: [sgd(m), None], "a list of SGD, NoneType"),
    "lists the wrong way round": (lambda m: ([StepLR(sgd(m), 1)], [sgd(m)]), "a tuple of list, list"),
    "three lists": (lambda m: ([sgd(m)], [], []), "a tuple of list, list, list"),
    "a pair": (lambda m: (sgd(m), StepLR(sgd(m), 1)), "a tuple of SGD, StepLR"),
    "nested lists": (lambda m: [[sgd(m)]], "a list of list"),
    "dictionaries and others": (lambda m: [{"optimizer": sgd(m)}, sgd(m)], "a list of dict, SGD"),
    "a set": (lambda m: {sgd(m)}, "something of type set"),
}


@pytest.mark.parametrize("name", NO_OPTIMIZER)
def test_configure_optimizers_returns_nonsense(name: str) -> None:
    configure, received = NO_OPTIMIZER[name]
    refuses_fit(with_optimizers(configure), "`configure_optimizers` returned", received, "It may return an optimiser")


def test_nonsense_is_refused_in_manual_optimisation_too() -> None:
    module = with_optimizers(lambda m: "adam")
    module.automatic_optimization = False
    refuses_fit(module, "'adam'")


NO_SCHEDULER: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "the class": (lambda m: scheduled(m, lambda o: StepLR), ["the class StepLR", "StepLR(optimizer, 10)"]),
    "a name": (lambda m: scheduled(m, lambda o: "cosine"), ["'cosine' of type str", "StepLR(optimizer, 10)"]),
    "None": (lambda m: {"optimizer": sgd(m), "lr_scheduler": None}, ["returned None", "leave it out"]),
    "no scheduler": (
        lambda m: {"optimizer": sgd(m), "lr_scheduler": {"interval": "step"}},
        ["'scheduler'", "interval"],
    ),
    "interval": (lambda m: scheduled(m, interval="batch"), ["'step' or 'epoch'", "'batch'"]),
    "frequency 0": (lambda m: scheduled(m, frequency=0), ["positive integer", "not 0"]),
    "frequency 1.5": (lambda m: scheduled(m, frequency=1.5), ["positive integer", "not 1.5"]),
    "frequency True": (lambda m: scheduled(m, frequency=True), ["positive integer", "not True"]),
    "an optimiser": (lambda m: ([sgd(m)], [sgd(m)]), ["SGD", "lr_scheduler_step"]),
    "of another optimiser": (lambda m: {"optimizer": sgd(m), "lr_scheduler": StepLR(sgd(m), 1)}, ["StepLR", "another"]),
    "plateau": (lambda m: scheduled(m, ReduceLROnPlateau), ["ReduceLROnPlateau", "'monitor': 'val_loss'"]),
}


@pytest.mark.parametrize("name", NO_SCHEDULER)
def test_configure_optimizers_returns_no_scheduler(name: str) -> None:
    configure, parts = NO_SCHEDULER[name]
    refuses_fit(with_optimizers(configure), *parts)


# Data


EMPTY: dict[str, Callable[[], Any]] = {
    "no samples": lambda: DataLoader(NOTHING, batch_size=2),
    "drop_last": lambda: DataLoader(TensorDataset(torch.ones(1, 2)), batch_size=2, drop_last=True),
    "an empty list": list,
}
UNSIZED: dict[str, Callable[[], Any]] = {
    "a stream without samples": lambda: DataLoader(Stream(0), batch_size=2),
    "a spent iterator": lambda: iter(()),
}
STAGES = {"train": "fit", "val": "validate", "test": "test", "predict": "predict"}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("stage", STAGES)
def test_an_empty_loader(stage: str, name: str) -> None:
    empty, module = EMPTY[name](), Validated() if stage == "val" else Small()
    parts = [f"the {stage} loader", f"limit_{stage}_batches=0"]
    refuses(lambda: getattr(trainer(), STAGES[stage])(module, empty), "at least one batch", *parts)
    assert not module.ran


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("sanity", [0, 2])
def test_an_empty_validation_loader_in_a_fit(name: str, sanity: int) -> None:
    module = Validated()
    call = lambda: trainer(num_sanity_val_steps=sanity).fit(module, loader(), EMPTY[name]())  # noqa: E731
    refuses(call, "at least one batch")
    assert not module.ran


@pytest.mark.parametrize("name", UNSIZED)
@pytest.mark.parametrize("stage", STAGES)
def test_a_loader_without_length_that_turns_out_empty(stage: str, name: str) -> None:
    """It may have something in the next pass, so the run continues, as Lightning's does."""
    module = Validated() if stage == "val" else Small()
    with pytest.warns(UserWarning, match="without length gave no batch in this pass"):
        getattr(trainer(), STAGES[stage])(module, UNSIZED[name]())
    assert not module.ran


def test_empty_epochs_without_end() -> None:
    module = Small()
    with pytest.warns(UserWarning, match="gave no batch in this pass"):
        refuses_fit(module, "max_epochs=-1", "forever", "a number", data=iter(()), max_epochs=-1, max_steps=5)


def test_one_of_several_loaders_is_empty() -> None:
    empty = DataLoader(NOTHING, batch_size=2)
    refuses_fit(Validated(), "the val loader", "is empty", data=(loader(), [loader(), empty]))
    refuses_fit(Small(), "the train loader", "is empty", data=[loader(), empty])


def test_an_iterator_can_be_read_once() -> None:
    module = Small()
    batches = iter([[torch.ones(2, 2)]])
    with pytest.warns(UserWarning, match="list_iterator without length gave no batch.*once only.*a list"):
        trainer(max_epochs=2).fit(module, batches)
    assert module.ran == ["training"]


def test_an_empty_loader_of_a_data_module() -> None:
    data = type("Data", (L.LightningDataModule,), {"train_dataloader": lambda self: DataLoader(NOTHING)})()
    refuses_fit(Small(), "`Data.train_dataloader()` is empty", "limit_train_batches=0", data=data)


@pytest.mark.parametrize("given", [3, object(), Data], ids=["int", "object", "class"])
def test_no_loader(given: Any) -> None:
    refuses_fit(Small(), "must be iterable", "the train loader", "Pass a DataLoader", data=given)
    data = type("Data", (L.LightningDataModule,), {"train_dataloader": lambda self: given})()
    refuses_fit(Small(), "must be iterable", "`Data.train_dataloader()` is", data=data)


@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
def test_no_loader_at_all(entry: str) -> None:
    stage = {"fit": "train", "validate": "val"}.get(entry, entry)
    parts = [f"There is no {stage} loader", f"`{stage}_dataloader`"]
    refuses(lambda: getattr(trainer(), entry)(Validated()), *parts, "Validated")
    nothing = L.LightningDataModule()
    refuses(lambda: getattr(trainer(), entry)(Validated(), datamodule=nothing), *parts, "LightningDataModule")


@pytest.mark.parametrize("data", [{"datamodule": Data()}, {"train_dataloaders": loader(), "val_dataloaders": loader()}])
def test_a_validation_loader_without_validation_step(data: dict[str, Any]) -> None:
    """As in Lightning, one warning, and training continues."""
    module = Small()
    with pytest.warns(UserWarning, match="Small has no `validation_step`: it will not be validated") as caught:
        trainer(num_sanity_val_steps=2).fit(module, **data)
    assert len(caught) == 1
    assert module.ran == ["training"] * 3


def test_a_validation_step_without_validation_loader() -> None:
    module = Validated()
    with pytest.warns(UserWarning, match="no validation loader: it will not be validated") as caught:
        trainer().fit(module, loader())
    assert len(caught) == 1
    assert module.ran == ["training"] * 3


def test_an_error_comes_without_warnings() -> None:
    """One message: what else is amiss can wait."""
    refuses_fit(Validated(), "There is no train loader", data=L.LightningDataModule())


def test_data_twice() -> None:
    both = ["Both loaders and a datamodule", "one of them"]
    refuses(lambda: trainer().fit(Small(), loader(), datamodule=Data()), *both)
    refuses(lambda: trainer().fit(Small(), val_dataloaders=loader(), datamodule=Data()), *both)
    refuses(lambda: trainer().test(Small(), loader(), datamodule=Data()), *both)
    refuses(lambda: trainer().fit(Small(), Data(), datamodule=Data()), "Two data modules", "Pass one")
    refuses(lambda: trainer().fit(Small(), datamodule=loader()), "LightningDataModule", "DataLoader")


@pytest.mark.parametrize("stage", ["train", "val", "test", "predict"])
def test_a_limit_that_leaves_nothing(stage: str) -> None:
    option = f"limit_{stage}_batches"
    entry = {"train": "fit", "val": "validate"}.get(stage, stage)
    module = Validated() if stage == "val" else Small()
    call = getattr(trainer(**{option: 0.1}), entry)
    refuses(lambda: call(module, loader(3)), f"{option}=0.1 of the 3 batches", f"{option}=0.3333")
    refuses(lambda: call(module, DataLoader(Stream(4))), f"{option}=0.1 is a fraction", "no length", "or 1.0")
    assert not module.ran


def test_validation_that_never_comes() -> None:
    data = (loader(3), loader())
    refuses_fit(Validated(), "val_check_interval=4", "training batches, 3", data=data, val_check_interval=4)
    data = (DataLoader(Stream(4)), loader())
    refuses_fit(Validated(), "val_check_interval=0.5 is a fraction", "no length", data=data, val_check_interval=0.5)


def test_modes_of_combined_loaders() -> None:
    sequential = CombinedLoader([loader(), loader()], "sequential")
    refuses_fit(Small(), "'sequential'", "cannot train", "'max_size_cycle'", data=sequential)
    together = CombinedLoader([loader(), loader()], "max_size")
    refuses(lambda: trainer().predict(Small(), together), "one after the other", "CombinedLoader(mode='sequential')")
