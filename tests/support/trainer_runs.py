"""A module, loaders and a trainer, small enough for a test to be about one thing; and what a refusal is."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from equipoise import ConfigurationError, Trainer
from tests.support.quiet import QUIET

__all__ = [
    "Data",
    "Small",
    "Stream",
    "Validated",
    "loader",
    "refuses",
    "refuses_fit",
    "saved",
    "trainer",
    "with_optimizers",
    "with_step",
]


class Small(L.LightningModule):
    """One linear layer, (batch, 2) → (batch, 1); remembers which steps ran.

    Attributes:
        ran: The names of the steps that ran, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.ran: list[str] = []

    def loss(self, batch: Any) -> Tensor:
        features = batch[0] if isinstance(batch, (list, tuple)) else batch
        return self.layer(features).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ran.append("training")
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.ran.append("test")
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.ran.append("predict")
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Validated(Small):
    """The same with a validation step, which would warn where there is no validation loader."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.ran.append("validation")
        self.log("val_loss", self.loss(batch))


class Stream(IterableDataset[tuple[Tensor]]):
    """Samples without a length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return iter([(torch.full((2,), float(index)),) for index in range(self.samples)])


def loader(batches: int = 3, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    """Batches of (batch, 2) features that count up: sample i is [i, i]."""
    samples = torch.arange(batches * batch_size, dtype=torch.float32).unsqueeze(1).expand(-1, 2).clone()
    return DataLoader(TensorDataset(samples), batch_size=batch_size, **options)


class Data(L.LightningDataModule):
    """The same loader for every stage."""

    def __init__(self, batches: int = 3) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Any:
        return loader(self.batches)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def trainer(cls: Any = Trainer, **options: Any) -> Any:
    """A trainer on the CPU that writes and shows nothing, for one epoch unless `max_epochs` is given.

    Args:
        cls: Ours, or Lightning's.
        options: Its arguments.
    """
    return cls(**{"accelerator": "cpu", **QUIET, "max_epochs": 1, **options})


def saved(module: L.LightningModule, folder: Path, cls: Any = Trainer, *, weights_only: bool = False) -> Path:
    """The checkpoint of a short fit.

    Args:
        module: The module.
        folder: Where the file goes.
        cls: Whose trainer.
        weights_only: Whether the weights alone are saved.
    """
    run, data = trainer(cls), (loader(), loader()) if isinstance(module, Validated) else (loader(),)
    run.fit(module, *data)
    run.save_checkpoint(folder / "x.ckpt", weights_only=weights_only)
    return folder / "x.ckpt"


def with_step(step: Callable[[Any, Any], Any], base: type[Small] = Small) -> Small:
    """A module whose training step is `step(module, batch)`."""

    class Module(base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return step(self, batch)

    return Module()


def with_optimizers(configure: Callable[[Any], Any], base: type[Small] = Small) -> Small:
    """A module whose `configure_optimizers` is `configure(module)`."""

    class Module(base):
        def configure_optimizers(self) -> Any:
            return configure(self)

    return Module()


def refuses(call: Callable[[], Any], *parts: str, error: type[Exception] = ConfigurationError) -> None:
    """Checks that a call fails with one message of one line, in which all the parts stand."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?")), message
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in: {message}"


def refuses_fit(module: Any, *parts: str, data: Any = None, **options: Any) -> None:
    """The same for a fit, of which no training step may run.

    Args:
        module: The module.
        parts: What the message says.
        data: A loader, or a tuple of them; by default one of three batches.
        options: Those of the trainer.
    """
    given = data if isinstance(data, tuple) else (loader() if data is None else data,)
    refuses(lambda: trainer(**options).fit(module, *given), *parts)
    assert "training" not in getattr(module, "ran", [])
