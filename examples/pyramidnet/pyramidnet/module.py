"""Training of the network: SGD whose learning rate falls in steps."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor

from pyramidnet.network import PyramidNet

__all__ = ["PyramidNetClassifier"]


class PyramidNetClassifier(LightningModule):
    """PyramidNet with the article's optimiser; the defaults are the article's network.

    Args:
        alpha: Growth of the width; see `PyramidNet`. Default: 270.
        units: Residual units in each of the three stages. Default: 17.
        lr: The learning rate at the start. Default: 0.1.
        momentum: SGD's momentum. Default: 0.9.
        weight_decay: SGD's weight decay. Default: 0.0001.
        drops: Shares of the training after which the learning rate falls to a tenth. Default: a half, three quarters.
    """

    def __init__(
        self,
        *,
        alpha: float = 270,
        units: int = 17,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        drops: tuple[float, ...] = (0.5, 0.75),
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = PyramidNet(alpha=alpha, units=units)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (batch, 3, 32, 32) to scores (batch, 10)."""
        return self.network(images)

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
        """Returns the class of each image of a batch."""
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> dict[str, object]:
        """SGD; the learning rate falls with the batches, so a run of any length passes all its drops."""
        settings = self.hparams
        optimizer = torch.optim.SGD(
            self.parameters(), lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
        steps = self.trainer.estimated_stepping_batches
        milestones = [round(share * steps) for share in settings.drops]
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _evaluate(self, name: str, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        scores = self(images)
        accuracy = (scores.argmax(dim=1) == labels).float().mean()
        self.log_dict({f"{name}_loss": F.cross_entropy(scores, labels), f"{name}_accuracy": accuracy}, prog_bar=True)
