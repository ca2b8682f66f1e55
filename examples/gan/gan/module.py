"""Two networks, and the step that trains them against each other."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

__all__ = ["GAN"]

_CLASSES = 10


class GAN(LightningModule):
    """A generator that draws digits, and a discriminator that tells them from real ones.

    Both know which digit an image should show. Each has an optimiser of its own, so `training_step` calls the
    backwards and steps the optimisers by itself.

    Args:
        size: Height and breadth of the images, a multiple of 4. Default: 8.
        noise: Random numbers from which an image is drawn. Default: 32.
        channels: Channels of the layer next to the image; the other has twice as many. Default: 32.
        lr: The learning rate of both networks. Default: 0.0005.
    """

    def __init__(self, *, size: int = 8, noise: int = 32, channels: int = 32, lr: float = 5e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = _generator(noise + _CLASSES, channels, size // 4)
        self.discriminator = _discriminator(channels, size // 4)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Draws images (batch, 1, size, size) with values from -1 to 1, one for each row of noise and each digit."""
        classes = F.one_hot(labels, _CLASSES).to(noise.dtype)
        return self.generator(torch.cat([noise, classes], dim=1))

    def scores(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns how real the images look as the digits that they should show: positive is real, negative drawn."""
        return self.discriminator(images).gather(1, labels.unsqueeze(1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Steps the discriminator, then the generator."""
        images, labels = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()
        noise = torch.randn(len(images), self.hparams.noise, dtype=images.dtype, device=images.device)
        drawn = self(noise, labels)

        # 1. The discriminator learns to give real images positive scores, and drawn ones negative scores.
        self.toggle_optimizer(discriminator_optimizer)
        of_real, of_drawn = self.scores(images, labels), self.scores(drawn.detach(), labels)
        discriminator_loss = F.softplus(-of_real).mean() + F.softplus(of_drawn).mean()
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

        # 2. The generator learns to draw images that get positive scores. The discriminator's weights are toggled off:
        # the gradient passes through them, and none is computed for them.
        self.toggle_optimizer(generator_optimizer)
        generator_loss = F.softplus(-self.scores(drawn, labels)).mean()
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

        self.log_dict({"discriminator_loss": discriminator_loss, "generator_loss": generator_loss}, prog_bar=True)

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """Adam for each network."""
        settings = {"lr": self.hparams.lr, "betas": (0.5, 0.999)}
        generator_optimizer = torch.optim.Adam(self.generator.parameters(), **settings)
        discriminator_optimizer = torch.optim.Adam(self.discriminator.parameters(), **settings)
        return generator_optimizer, discriminator_optimizer


def _generator(inputs: int, channels: int, quarter: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 2 * channels * quarter * quarter, bias=False),
        nn.Unflatten(1, (2 * channels, quarter, quarter)),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * channels, channels, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.ConvTranspose2d(channels, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def _discriminator(channels: int, quarter: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, channels, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(2 * channels * quarter * quarter, _CLASSES),
    )
