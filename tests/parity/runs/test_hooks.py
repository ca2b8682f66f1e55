"""Data modules, data hooks and the order in which everything is set up and torn down."""

from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from .. import data
from ..data import CLASSES, FEATURES
from ..harness import Case, parity
from ..modules import Classifier


class DataModule(L.LightningDataModule):
    """Everything a data module may have."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"batches": 4})
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append("setup " + stage)
        self.train, self.val = data.samples(16, 1), data.samples(9, 2)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=4)

    def test_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=3)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=2)

    def teardown(self, stage: str) -> None:
        self.calls.append("teardown " + stage)

    def on_exception(self, exception: BaseException) -> None:
        self.calls.append(f"on_exception {exception}")

    def state_dict(self) -> dict[str, Any]:
        return {"calls": list(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["from_data"] = 3


class Transferring(Classifier):
    """Changes batches on their way to the device."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"features": batch[0] / 2, "labels": batch[1]}

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device({**batch, "loader": dataloader_idx}, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch["features"] - batch["loader"], batch["labels"]]


class BuiltLate(Classifier):
    """Makes its layers in `configure_model`, and loads its own loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(FEATURES, CLASSES))

    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        self.stages = [*getattr(self, "stages", []), stage]

    def train_dataloader(self) -> Any:
        return data.loader(3, 1)

    def val_dataloader(self) -> Any:
        return data.loader(2, 2)


class Fails(Classifier):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if not self.trainer.sanity_checking:
            raise ArithmeticError("as asked")
        return super().validation_step(batch, batch_idx)


def data_calls(trainer: Any) -> Any:
    return trainer.datamodule.calls


def all_entries(trainer: Any, module: Any, given: Any) -> Any:
    trainer.fit(module, **given)
    return [
        trainer.validate(module, verbose=False, **given),
        trainer.test(module, verbose=False, **given),
        trainer.predict(module, **given),
    ]


BARE = {"barebones": True, "log_every_n_steps": None, "enable_progress_bar": None, "enable_model_summary": None}

CASES = [
    Case(
        name="data-module",
        data=lambda: {"datamodule": DataModule()},
        run=all_entries,
        observe=data_calls,
        proves=lambda r: r["observed"].count("prepare_data") == 4 and "teardown predict" in r["observed"],
    ),
    Case(
        name="data-module-sees-the-error",
        module=Fails,
        data=lambda: {"datamodule": DataModule()},
        observe=data_calls,
        raises=ArithmeticError,
        proves=lambda r: "on_exception as asked" in r["observed"],
    ),
    Case(
        name="data-module-from-datasets",
        data=lambda: {
            "datamodule": L.LightningDataModule.from_datasets(data.samples(16, 1), data.samples(8, 2), batch_size=4)
        },
    ),
    Case(
        name="module-transfers",
        module=Transferring,
        data=data.several_val,
        run=lambda t, m, g: (t.fit(m, **g), t.predict(m, g["val_dataloaders"]))[1],
    ),
    Case(name="module-built-late", module=BuiltLate, data=dict, observe=lambda t: t.lightning_module.stages),
    Case(name="barebones", options=BARE, logger=lambda root: None, watch=False),
    Case(name="deterministic", options={"deterministic": True}, watch=False),
    Case(name="detect-anomaly", options={"detect_anomaly": True}, watch=False),
]

test_parity = parity(CASES)
