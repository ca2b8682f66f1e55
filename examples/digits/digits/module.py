"""The model and how it is trained."""

import math

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

__all__ = ["ConvNet"]


class ConvNet(LightningModule):
    """Two convolutions and a linear layer for grey images of 8 by 8 pixels.

    Args:
        channels: Channels of the first convolution; the second has twice as many. Default: 32.
        dropout: The share of features left out in training, between 0 and 1. Default: 0.2.
        lr: The highest learning rate of the schedule. Default: 0.005.
        weight_decay: AdamW's weight decay. Default: 0.01.
    """

    def __init__(
        self, *, channels: int = 32, dropout: float = 0.2, lr: float = 0.005, weight_decay: float = 0.01
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.weight_decay = lr, weight_decay
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * channels * 4 * 4, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (batch, 1, 8, 8) to scores (batch, 10)."""
        return self.layers(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the cross-entropy of a batch of images and labels."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs loss and accuracy on the validation set."""
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs loss and accuracy on the test set."""
        self._evaluate("test", batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the digits a batch of images shows."""
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW; the learning rate rises, then falls along a cosine, with every batch until the end of the training."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._share_of_lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _share_of_lr(self, step: int) -> float:
        done = min(step / self.trainer.estimated_stepping_batches, 1.0)
        return done / 0.3 + 0.01 if done < 0.3 else 0.5 * (1 + math.cos(math.pi * (done - 0.3) / 0.7))

    def _evaluate(self, name: str, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        scores = self(images)
        accuracy = (scores.argmax(dim=1) == labels).float().mean()
        self.log_dict(
            {f"{name}_loss": F.cross_entropy(scores, labels), f"{name}_accuracy": accuracy}, prog_bar=name == "val"
        )
