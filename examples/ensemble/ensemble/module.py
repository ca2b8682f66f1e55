"""A small classifier, and one that learns from an ensemble of them."""

from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

from equipoise import split_ensemble

__all__ = ["CLASSES", "Classifier", "Student", "measures"]

CLASSES = 10


def measures() -> dict[str, torch.nn.Module]:
    """Returns what is measured of probabilities: accuracy, and the expected calibration error in 15 bins."""
    return {
        "test_accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "test_calibration_error": MulticlassCalibrationError(CLASSES, n_bins=15),
    }


class Classifier(LightningModule):
    """Two convolutions and a linear layer, for digits of 8 by 8 pixels.

    Args:
        channels: Channels of the first convolution; the second has twice as many. Default: 4.
        lr: The learning rate of Adam. Default: 0.01.
    """

    def __init__(self, *, channels: int = 4, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * 4 * 4, CLASSES),
        )
        self.measures = nn.ModuleDict(measures())

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (batch, 1, 8, 8) to scores (batch, 10)."""
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the cross-entropy of a batch of images and labels."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns probabilities (batch, 10); under `EnsembleStrategy` a callback receives their mean."""
        images, labels = batch
        probabilities = self(images).softmax(dim=1)
        for name, metric in self.measures.items():
            metric(probabilities, labels)
            self.log(name, metric)
        return probabilities

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Student(Classifier):
    """A classifier that learns the probabilities of an ensemble, averaged over its members, instead of labels.

    This is distillation as in "Distilling the Knowledge in a Neural Network" (Hinton, Vinyals, Dean, 2015).

    Args:
        teacher: Checkpoint of an ensemble of `Classifier`; None: learn from the labels.
        temperature: Divides all scores before they become probabilities, so that the less likely digits count, too.
            Default: 3.
        channels: Channels of the first convolution. Default: 2.
        lr: The learning rate of Adam. Default: 0.01.
    """

    def __init__(
        self, *, teacher: str | None = None, temperature: float = 3.0, channels: int = 2, lr: float = 0.01
    ) -> None:
        super().__init__(channels=channels, lr=lr)
        self.save_hyperparameters()
        # In a tuple, so that the teachers are no part of the module: neither trained nor saved.
        self._teachers: tuple[Classifier, ...] = ()

    def on_fit_start(self) -> None:
        """Reads the members of the ensemble."""
        if self.hparams.teacher is None:
            return
        with TemporaryDirectory() as folder:
            paths = split_ensemble(self.hparams.teacher, folder)
            self._teachers = tuple(Classifier.load_from_checkpoint(path).to(self.device).eval() for path in paths)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the divergence from the teachers' probabilities."""
        if not self._teachers:
            return super().training_step(batch, batch_idx)
        images, _ = batch
        temperature = self.hparams.temperature
        with torch.no_grad():
            of_members = [(teacher(images) / temperature).softmax(dim=1) for teacher in self._teachers]
            targets = torch.stack(of_members).mean(dim=0)
        predictions = (self(images) / temperature).log_softmax(dim=1)
        # The square makes the gradients as large as those without a temperature.
        loss = temperature**2 * F.kl_div(predictions, targets, reduction="batchmean")
        self.log("train_loss", loss, prog_bar=True)
        return loss
