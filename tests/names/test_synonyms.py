"""Messages name what a word of another library, or of an older version, means here."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

import equipoise
from equipoise import Trainer
from equipoise.errors import ConfigurationError
from tests.support.trainer_runs import Small, loader, trainer


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"gpus": 2}, "'devices'"),
        ({"epochs": 2}, "'max_epochs'"),
        ({"fp16": True}, "'precision=16-mixed'"),
        ({"resume_from_checkpoint": "last.ckpt"}, r"`fit\(ckpt_path=...\)`"),
    ],
)
def test_arguments_of_the_trainer(given: dict[str, object], meant: str) -> None:
    with pytest.raises(TypeError, match=rf"did you mean {meant}\?$"):
        Trainer(**given)


@pytest.mark.parametrize(
    ("name", "meant"), [("on_epoch_end", "on_train_epoch_end"), ("on_train_begin", "on_train_start")]
)
def test_hooks_of_other_names(name: str, meant: str) -> None:
    kind = type("Older", (Callback,), {name: lambda self, trainer, module: None})
    with pytest.warns(UserWarning, match=rf"did you mean `{meant}`\?"):
        trainer(max_steps=1, callbacks=[kind()]).fit(Small(), loader())


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("ModelCheckpoint", "lightning.pytorch.callbacks"),
        ("CSVLogger", "lightning.pytorch.loggers"),
        ("seed_everything", "lightning.pytorch"),
    ],
)
def test_names_of_lightning(name: str, place: str) -> None:
    assert not hasattr(equipoise, name)
    with pytest.raises(AttributeError, match=f"no attribute {name!r}; it is Lightning's: from {place} import {name}$"):
        getattr(equipoise, name)
    with pytest.raises(AttributeError, match=r"no attribute 'Nothing'$"):
        equipoise.Nothing  # noqa: B018


def test_what_is_no_lightning_module() -> None:
    with pytest.raises(TypeError, match=r"not .*DataLoader\. The module comes first, then its data"):
        trainer().fit(loader(), Small())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not .*Linear\. Derive a class from LightningModule that holds it"):
        trainer().fit(torch.nn.Linear(1, 1), loader())  # type: ignore[arg-type]


def test_a_loader_that_leaves_out_its_only_batch() -> None:
    with pytest.raises(ConfigurationError, match="is empty, as one with drop_last=True"):
        trainer().fit(Small(), DataLoader(torch.zeros(2, 4), batch_size=4, drop_last=True))


def test_a_logger_by_the_name_that_the_command_takes() -> None:
    with pytest.raises(ConfigurationError, match=r"such as TensorBoardLogger\('logs'\)"):
        trainer(logger="tensorboard")
