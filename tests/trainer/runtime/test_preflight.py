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


IN_TURN = ["`Module.training_step`", "`optimizer_idx`", "GAN", "self.automatic_optimization = False"]
PULLS = [
    "`Module.training_step(dataloader_iter)`",
    "`training_step(self, batch, batch_idx)`",
    "accumulate_grad_batches",
]
BARE = L.LightningModule


@pytest.mark.parametrize(
    ("base", "methods", "words"),
    [
        (BARE, {"configure_optimizers": nothing}, ["`fit` needs `training_step`", "`training_step`. Define it"]),
        (BARE, {"trainig_step": nothing, "configure_optimizers": nothing}, ["Rename `trainig_step`"]),
        (BARE, {"training_step": nothing}, ["Module does not define `configure_optimizers`", "Define it"]),
        (Small, {"training_epoch_end": nothing}, ["`Module.training_epoch_end`", "Use `on_train_epoch_end`"]),
        (Small, {"validation_epoch_end": nothing}, ["Lightning 1.x", "Use `on_validation_epoch_end`"]),
        (Small, {"training_step": lambda self, batch, batch_idx, optimizer_idx: None}, IN_TURN),
        (Small, {"training_step": lambda self, batch, batch_idx, other: None}, ["(self, batch, batch_idx)"]),
        (Small, {"training_step": lambda self, dataloader_iter: None}, PULLS),
        (Small, {"configure_callbacks": lambda self: [EarlyStopping]}, ["the class EarlyStopping", "EarlyStopping(.."]),
    ],
)
def test_a_method_that_is_missing_or_wrong_is_refused(base: Any, methods: dict[str, Any], words: list[str]) -> None:
    refuses_fit(type("Module", (base,), methods)(), *words)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 1), ["LightningModule", "torch.nn.modules.linear.Linear"]),
        ("resnet", ["LightningModule", "builtins.str"]),
        (Small, ["not a class", "`Small(...)`"]),
        (None, ["needs a module", "none was passed", "no run before"]),
    ],
    ids=["nn.Module", "str", "class", "None"],
)
def test_what_is_no_lightning_module_is_refused(model: Any, words: list[str]) -> None:
    refuses_fit(model, *words)


ENTRIES = [("validate", "validation_step"), ("test", "test_step"), ("predict", "predict_step")]


@pytest.mark.parametrize(("entry", "step"), ENTRIES)
def test_an_evaluation_step_that_is_missing_or_pulls_its_batches_is_refused(entry: str, step: str) -> None:
    call = getattr(trainer(), entry)
    refuses(lambda: call(BARE(), loader()), f"`{entry}`", f"`{step}`", "LightningModule", "Define")
    pulls = type("Module", (Small,), {step: lambda self, dataloader_iter: None})()
    refuses(lambda: call(pulls, loader()), f"`Module.{step}(dataloader_iter)`", f"`{step}(self, batch, batch_idx)`")


REQUIRED = "asks for `dataloader_idx`. Leave it out or give it a default"
LACKING = "does not take their index. Add `dataloader_idx=0`"


@pytest.mark.parametrize(
    ("entry", "hook", "method", "several", "words"),
    [
        ("validate", "validation_step", lambda self, batch, batch_idx, dataloader_idx: None, False, REQUIRED),
        ("validate", "validation_step", lambda self, batch, batch_idx: None, True, LACKING),
        ("validate", "on_validation_batch_start", lambda self, batch, index, dataloader_idx: None, False, "idx=0`"),
        ("validate", "on_validation_batch_start", lambda self, batch, index: None, True, "Add `dataloader_idx=0`"),
        ("validate", "on_validation_batch_end", lambda self, out, batch, idx: None, True, "Add `dataloader_idx=0`"),
        ("test", "test_step", lambda self, batch, batch_idx: None, True, LACKING),
        ("predict", "predict_step", lambda self, batch, batch_idx: None, True, "Add `dataloader_idx=0`"),
    ],
)
def test_the_index_of_the_loader_is_an_argument_where_there_are_several(
    entry: str, hook: str, method: Any, several: bool, words: str
) -> None:
    module = type("Module", (Validated,), {hook: method})()
    data = [loader(), loader()] if several else loader()
    # Lightning raises a RuntimeError.
    error = ConfigurationRuntimeError
    refuses(lambda: getattr(trainer(), entry)(module, data), f"`Module.{hook}`", words, error=error)
    if entry == "validate":
        refuses(lambda: trainer().fit(module, loader(), data), f"`Module.{hook}`", words, error=error)


# Optimisers and schedulers

FORMS = "It may return an optimiser"

CONFIGURED: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    # No optimisers.
    "a name": (lambda m: "adam", [FORMS, "'adam' of type str"]),
    "the class": (lambda m: SGD, [FORMS, "the class SGD"]),
    "parameters": (lambda m: list(m.parameters()), [FORMS, "a list of Parameter, Parameter"]),
    "an empty list": (lambda m: [], [FORMS, "an empty list"]),
    "an empty dictionary": (lambda m: {}, [FORMS, "keys []"]),
    "a mistyped key": (lambda m: {"optimiser": sgd(m)}, [FORMS, "keys ['optimiser']"]),
    "a dictionary with None": (lambda m: {"optimizer": None}, [FORMS, "under 'optimizer' is None"]),
    "a dictionary of schedulers": (lambda m: {"lr_scheduler": StepLR(sgd(m), 1)}, [FORMS, "no 'optimizer'"]),
    "the wrong way round": (lambda m: ([StepLR(sgd(m), 1)], [sgd(m)]), [FORMS, "a tuple of list, list"]),
    "a pair": (lambda m: (sgd(m), StepLR(sgd(m), 1)), [FORMS, "a tuple of SGD, StepLR"]),
    "nested lists": (lambda m: [[sgd(m)]], [FORMS, "a list of list"]),
    "dictionaries and others": (lambda m: [{"optimizer": sgd(m)}, sgd(m)], [FORMS, "a list of dict, SGD"]),
    # No schedulers.
    "a class": (lambda m: scheduled(m, lambda o: StepLR), ["the class StepLR", "StepLR(optimizer, 10)"]),
    "another name": (lambda m: scheduled(m, lambda o: "cosine"), ["'cosine' of type str", "StepLR(optimizer, 10)"]),
    "None": (lambda m: {"optimizer": sgd(m), "lr_scheduler": None}, ["returned None", "leave it out"]),
    "no scheduler": (
        lambda m: {"optimizer": sgd(m), "lr_scheduler": {"interval": "step"}},
        ["'scheduler'", "interval"],
    ),
    "interval": (lambda m: scheduled(m, interval="batch"), ["'step' or 'epoch'", "'batch'"]),
    "frequency 0": (lambda m: scheduled(m, frequency=0), ["positive integer", "not 0"]),
    "frequency 1.5": (lambda m: scheduled(m, frequency=1.5), ["positive integer", "not 1.5"]),
    "an optimiser": (lambda m: ([sgd(m)], [sgd(m)]), ["SGD", "lr_scheduler_step"]),
    "of another optimiser": (lambda m: {"optimizer": sgd(m), "lr_scheduler": StepLR(sgd(m), 1)}, ["StepLR", "another"]),
    "plateau": (lambda m: scheduled(m, ReduceLROnPlateau), ["ReduceLROnPlateau", "'monitor': 'val_loss'"]),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_what_configure_optimizers_may_not_return_is_refused(name: str) -> None:
    configure, words = CONFIGURED[name]
    refuses_fit(with_optimizers(configure), "`configure_optimizers` returned" if FORMS in words else "", *words)


def test_manual_optimisation_is_refused_what_is_no_optimiser_too() -> None:
    module = with_optimizers(lambda m: "adam")
    module.automatic_optimization = False
    refuses_fit(module, "'adam'")


# Data


EMPTY: dict[str, Callable[[], Any]] = {
    "no samples": lambda: DataLoader(NOTHING, batch_size=2),
    "drop_last": lambda: DataLoader(TensorDataset(torch.ones(1, 2)), batch_size=2, drop_last=True),
    "an empty list": list,
}
STAGES = {"train": "fit", "val": "validate", "test": "test", "predict": "predict"}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("stage", STAGES)
def test_an_empty_loader_is_refused(stage: str, name: str) -> None:
    empty, module = EMPTY[name](), Validated() if stage == "val" else Small()
    words = [f"the {stage} loader", f"limit_{stage}_batches=0"]
    refuses(lambda: getattr(trainer(), STAGES[stage])(module, empty), "at least one batch", *words)
    assert not module.ran


@pytest.mark.parametrize("stage", STAGES)
def test_a_limit_of_0_disables_a_stage_whose_loader_is_empty(stage: str) -> None:
    module = Validated() if stage == "val" else Small()
    getattr(trainer(**{f"limit_{stage}_batches": 0}), STAGES[stage])(module, [])
    assert not module.ran


@pytest.mark.parametrize("sanity", [0, 2])
def test_an_empty_validation_loader_is_refused_in_a_fit(sanity: int) -> None:
    refuses_fit(Validated(), "at least one batch", data=(loader(), []), num_sanity_val_steps=sanity)


@pytest.mark.parametrize("stage", STAGES)
def test_a_loader_without_length_that_turns_out_empty_is_a_warning(stage: str) -> None:
    """It may have something in the next pass, so the run continues, as Lightning's does."""
    for unsized in (DataLoader(Stream(0), batch_size=2), iter(())):
        module = Validated() if stage == "val" else Small()
        with pytest.warns(UserWarning, match="without length gave no batch in this pass"):
            getattr(trainer(), STAGES[stage])(module, unsized)
        assert not module.ran


def test_empty_epochs_without_end_are_refused() -> None:
    module = Small()
    with pytest.warns(UserWarning, match="gave no batch in this pass"):
        refuses_fit(module, "max_epochs=-1", "forever", "a number", data=iter(()), max_epochs=-1, max_steps=5)


def test_an_iterator_that_was_read_is_a_warning() -> None:
    module = Small()
    batches = iter([[torch.ones(2, 2)]])
    with pytest.warns(UserWarning, match="list_iterator without length gave no batch.*once only.*a list"):
        trainer(max_epochs=2).fit(module, batches)
    assert module.ran == ["training"]


def data_module(given: Any) -> L.LightningDataModule:
    """A data module whose training loader is given."""
    return type("Data", (L.LightningDataModule,), {"train_dataloader": lambda self: given})()


@pytest.mark.parametrize("given", [3, Data], ids=["int", "class"])
def test_what_cannot_be_iterated_is_no_loader(given: Any) -> None:
    refuses_fit(Small(), "must be iterable", "the train loader", "Pass a DataLoader", data=given)
    refuses_fit(Small(), "must be iterable", "`Data.train_dataloader()` is", data=data_module(given))


def empty() -> DataLoader[Any]:
    return DataLoader(NOTHING, batch_size=2)


@pytest.mark.parametrize("mode", [None, "max_size_cycle", "max_size"])
def test_one_empty_loader_of_several_is_refused(mode: Any) -> None:
    several = [loader(), empty()]
    together = several if mode is None else CombinedLoader(several, mode)
    refuses_fit(Small(), "the train loader", "is empty", data=together)
    refuses_fit(Validated(), "the val loader", "is empty", data=(loader(), several))


FEW = {"val_check_interval": 4}
HALF = {"val_check_interval": 0.5}


@pytest.mark.parametrize(
    ("module", "data", "options", "words"),
    [
        (Small, lambda: data_module(empty()), {}, ["`Data.train_dataloader()` is empty", "limit_train_batches=0"]),
        # One message: what else is amiss can wait.
        (Validated, L.LightningDataModule, {}, ["There is no train loader"]),
        (Validated, lambda: (loader(3), loader()), FEW, ["val_check_interval=4", "training batches, 3"]),
        (Validated, lambda: (DataLoader(Stream(4)), loader()), HALF, ["=0.5 is a fraction", "no length"]),
        (Small, lambda: CombinedLoader([loader(), loader()], "sequential"), {}, ["'sequential'", "'max_size_cycle'"]),
    ],
)
def test_data_of_a_fit_that_cannot_be_are_refused(
    module: type[Small], data: Callable[[], Any], options: dict[str, Any], words: list[str]
) -> None:
    refuses_fit(module(), *words, data=data(), **options)


def test_loaders_that_are_read_together_are_refused_by_predict_and_one_after_the_other_are_not() -> None:
    together = CombinedLoader([loader(), loader()], "max_size")
    refuses(lambda: trainer().predict(Small(), together), "one after the other", "CombinedLoader(mode='sequential')")
    one_by_one = CombinedLoader([loader(), loader()], "sequential")
    assert [len(outputs) for outputs in trainer().predict(Small(), one_by_one)] == [3, 3]


@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
def test_a_missing_loader_is_refused(entry: str) -> None:
    stage = {"fit": "train", "validate": "val"}.get(entry, entry)
    parts = [f"There is no {stage} loader", f"`{stage}_dataloader`"]
    refuses(lambda: getattr(trainer(), entry)(Validated()), *parts, "Validated")
    nothing = L.LightningDataModule()
    refuses(lambda: getattr(trainer(), entry)(Validated(), datamodule=nothing), *parts, "LightningDataModule")


def test_a_validation_loader_without_validation_step_is_a_warning() -> None:
    """As in Lightning, one warning, and training continues."""
    module = Small()
    with pytest.warns(UserWarning, match="Small has no `validation_step`: it will not be validated") as caught:
        trainer(num_sanity_val_steps=2).fit(module, datamodule=Data())
    assert len(caught) == 1
    assert module.ran == ["training"] * 3


def test_a_validation_step_without_validation_loader_is_a_warning() -> None:
    module = Validated()
    with pytest.warns(UserWarning, match="no validation loader: it will not be validated") as caught:
        trainer().fit(module, loader())
    assert len(caught) == 1
    assert module.ran == ["training"] * 3


def test_data_given_twice_are_refused() -> None:
    both = ["Both loaders and a datamodule", "one of them"]
    refuses(lambda: trainer().fit(Small(), loader(), datamodule=Data()), *both)
    refuses(lambda: trainer().fit(Small(), val_dataloaders=loader(), datamodule=Data()), *both)
    refuses(lambda: trainer().test(Small(), loader(), datamodule=Data()), *both)
    refuses(lambda: trainer().fit(Small(), Data(), datamodule=Data()), "Two data modules", "Pass one")
    refuses(lambda: trainer().fit(Small(), datamodule=loader()), "LightningDataModule", "DataLoader")


@pytest.mark.parametrize("stage", ["train", "val", "test", "predict"])
def test_a_limit_that_leaves_no_batch_is_refused(stage: str) -> None:
    option = f"limit_{stage}_batches"
    entry = {"train": "fit", "val": "validate"}.get(stage, stage)
    module = Validated() if stage == "val" else Small()
    call = getattr(trainer(**{option: 0.1}), entry)
    refuses(lambda: call(module, loader(3)), f"{option}=0.1 of the 3 batches", f"{option}=0.3333")
    refuses(lambda: call(module, DataLoader(Stream(4))), f"{option}=0.1 is a fraction", "no length", "or 1.0")
    assert not module.ran
