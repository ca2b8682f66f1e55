"""`validate`, `test` and `predict`: what they return, log and call, alone and after `fit`."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from .. import data
from ..harness import Case, Record, parity
from ..modules import Classifier

Run = Callable[[Any, Any, Mapping[str, Any]], Any]


def validate(trainer: Any, module: Any, given: Mapping[str, Any]) -> Any:
    return trainer.validate(module, given["val_dataloaders"], verbose=False)


def run_test(trainer: Any, module: Any, given: Mapping[str, Any]) -> Any:
    return trainer.test(module, dataloaders=given["val_dataloaders"], verbose=False)


def predict(trainer: Any, module: Any, given: Mapping[str, Any]) -> Any:
    return trainer.predict(module, given["val_dataloaders"])


def predict_without_returning(trainer: Any, module: Any, given: Mapping[str, Any]) -> Any:
    return trainer.predict(module, given["val_dataloaders"], return_predictions=False)


def everything(trainer: Any, module: Any, given: Mapping[str, Any]) -> Any:
    """All entry points on one trainer, one after another."""
    before = validate(trainer, module, given)
    trainer.fit(module, **given)
    return [before, validate(trainer, module, given), run_test(trainer, module, given), predict(trainer, module, given)]


def with_datamodule(entry: str) -> Run:
    def run(trainer: Any, module: Any, given: Mapping[str, Any]) -> Any:
        return getattr(trainer, entry)(module, **given)

    return run


class DataModule(L.LightningDataModule):
    def val_dataloader(self) -> Any:
        return data.loader(3, 2, odd=1)

    def test_dataloader(self) -> Any:
        return [data.loader(2, 3), data.loader(1, 4)]

    def predict_dataloader(self) -> Any:
        return [data.loader(2, 3), data.loader(1, 4)]


class Modes(Classifier):
    """Logs the mode it is evaluated in."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("inference", float(torch.is_inference_mode_enabled()))
        self.log("gradients", float(torch.is_grad_enabled()))
        self.log("training", float(self.net.training))
        super().validation_step(batch, batch_idx, dataloader_idx)


class ByStep(Classifier):
    """Logs test values by step too, so the x-axis of evaluation steps shows."""

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch)
        self.log("test_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss, "logits": self(batch[0])}

    def on_test_epoch_end(self) -> None:
        self.log("test_end", 1.0)


class PredictsSome(Classifier):
    """Returns nothing for some batches."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return None if batch_idx == 1 else {"index": (batch_idx, dataloader_idx), "logits": self(batch[0])}


class Writer(BasePredictionWriter):
    """Writes predictions to files, with the indices of their samples."""

    def __init__(self, interval: Literal["batch", "epoch", "batch_and_epoch"]) -> None:
        super().__init__(interval)

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *rest: Any) -> None:
        _, batch_idx, dataloader_idx = rest
        torch.save((prediction, batch_indices), f"batch-{dataloader_idx}-{batch_idx}.pt")

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save((predictions, batch_indices), "epoch.pt")


def shuffled_two() -> dict[str, Any]:
    return {"val_dataloaders": [data.loader(3, 2, shuffle=True, odd=1), data.loader(2, 3)]}


def files(record: Record, part: str) -> int:
    return sum(part in name for name in record["files"])


DATA = {"data": lambda: {"datamodule": DataModule()}}

CASES = [
    Case(
        name="validate-in-inference-mode",
        module=Modes,
        run=validate,
        proves=lambda r: r["returned"][0]["inference"] == 1,
    ),
    Case(
        name="validate-without-inference-mode",
        module=Modes,
        run=validate,
        options={"inference_mode": False},
        proves=lambda r: r["returned"][0]["inference"] == 0,
    ),
    Case(name="test-by-step", module=ByStep, run=run_test, data=data.several_val),
    Case(name="test-shuffled", run=run_test, data=shuffled_two, options={"limit_test_batches": 0.7}),
    Case(
        name="predict-several-loaders",
        run=predict,
        data=data.several_val,
        proves=lambda r: [len(p) for p in r["returned"]] == [3, 3],
    ),
    Case(name="predict-nothing-for-some", module=PredictsSome, run=predict),
    Case(name="predict-without-returning", run=predict_without_returning, proves=lambda r: r["returned"] is None),
    *(
        Case(
            name=f"predictions-written-by-{interval}",
            run=predict,
            data=shuffled_two,
            callbacks=lambda interval=interval: [Writer(interval)],
            proves=lambda r: files(r, ".pt") > 0,
        )
        for interval in ("epoch", "batch_and_epoch")
    ),
    *(
        Case(name=f"{entry}-with-datamodule", run=with_datamodule(entry), **DATA)
        for entry in ("validate", "test", "predict")
    ),
    Case(name="everything-on-one-trainer", module=lambda: Classifier(dropout=0.5), run=everything, data=data.shuffled),
]

test_parity = parity(CASES)
