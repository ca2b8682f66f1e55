"""When validation runs inside `fit`, how much of it, and in which mode."""

from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader

from equipoise import ConfigurationError

from .. import data
from ..harness import Case, Record, column, parity
from ..modules import Classifier


def validated(record: Record) -> int:
    """Return the number of validations that ended."""
    return len(column(record, "val_loss"))


class Frozen(Classifier):
    """Keeps a part of the network in evaluation mode; validation must leave it so."""

    def on_fit_start(self) -> None:
        self.net[0].eval()


class OwnModes(Classifier):
    """Overrides how the modes change around validation."""

    def on_validation_model_eval(self) -> None:
        self.eval()
        self.net[3].train()

    def on_validation_model_train(self) -> None:
        self.train()
        self.net[1].eval()

    def on_validation_model_zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)


class GradientsInValidation(Classifier):
    """Differentiates within validation, which needs `inference_mode=False`."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        with torch.enable_grad():
            features = batch[0].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.loss((features, batch[1])), features)
        self.log("val_loss", gradient.norm())


class SideBySide(Classifier):
    """Validates on a batch of each loader at once."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for index, part in enumerate(batch):
            self.log(f"val_loss_{index}", self.loss(part), batch_size=len(part[0]))


def two_loaders() -> Any:
    return [data.loader(3, 2), data.loader(2, 3, odd=2)]


def no_validation_data() -> dict[str, Any]:
    return {"train_dataloaders": data.loader(4)}


CASES = [
    Case(
        name="every-second-epoch",
        options={"max_epochs": 5, "check_val_every_n_epoch": 2},
        proves=lambda r: validated(r) == 2,
    ),
    Case(name="every-two-batches", options={"val_check_interval": 2}, proves=lambda r: validated(r) == 6),
    Case(name="half-an-epoch", options={"val_check_interval": 0.5}, proves=lambda r: validated(r) == 4),
    Case(
        name="across-epochs-longer-than-one",
        options={"val_check_interval": 8, "check_val_every_n_epoch": None, "max_epochs": 4},
        proves=lambda r: validated(r) == 3,
    ),
    Case(
        name="interval-longer-than-epoch",
        options={"val_check_interval": 8},
        raises=ValueError,
        refuses=ConfigurationError,
    ),
    *(Case(name=f"sanity-check-{steps}", options={"num_sanity_val_steps": steps}) for steps in (0, 1, -1)),
    Case(name="sanity-check-shuffled-with-dropout", module=lambda: Classifier(dropout=0.5), data=data.shuffled),
    Case(
        name="several-loaders-by-name",
        data=lambda: {**data.several_val(), "val_dataloaders": {"a": data.loader(2, 3), "b": data.loader(3, 4)}},
    ),
    Case(
        name="several-loaders-side-by-side",
        module=SideBySide,
        data=lambda: {**data.several_val(), "val_dataloaders": CombinedLoader(two_loaders(), "min_size")},
    ),
    Case(
        name="several-loaders-one-after-another",
        data=lambda: {**data.several_val(), "val_dataloaders": CombinedLoader(two_loaders(), "sequential")},
        options={"limit_val_batches": 1, "val_check_interval": 2},
    ),
    Case(
        name="by-time-at-every-batch",
        options={"val_check_interval": "00:00:00:00"},
        proves=lambda r: validated(r) == 12,
    ),
    Case(name="without-loader", data=no_validation_data, proves=lambda r: r["counters"]["num_val_batches"] == []),
    Case(name="limit-zero", options={"limit_val_batches": 0}),
    Case(
        name="frozen-part", module=Frozen, proves=lambda r: r["modes"]["net.0"] is False and r["modes"]["net.4"] is True
    ),
    Case(name="own-modes", module=OwnModes, options={"val_check_interval": 2}),
    Case(name="inference-mode-off", module=GradientsInValidation, options={"inference_mode": False}),
]

test_parity = parity(CASES)
