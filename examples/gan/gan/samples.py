"""A callback that writes what the generator draws, as a picture."""

from pathlib import Path

import torch
from torch import Tensor

from equipoise import Callback, Trainer
from gan.module import GAN
from gan.png import write_png

__all__ = ["SampleGrid"]


class SampleGrid(Callback):
    """Writes `samples/epochNNN.png` into the folder of the run: a column for each digit, the same noise in each epoch.

    Args:
        rows: Images of each digit. Default: 6.
        zoom: Height and breadth of a pixel in the picture. Default: 1.
        every_n_epochs: Epochs between two pictures. Default: 1.
        seed: Seed of the noise, which is drawn from a generator of its own, so the training stays the same.
            Default: 0.
    """

    def __init__(self, *, rows: int = 6, zoom: int = 1, every_n_epochs: int = 1, seed: int = 0) -> None:
        self.rows, self.zoom, self.every_n_epochs, self.seed = rows, zoom, every_n_epochs, seed

    def on_train_epoch_end(self, trainer: Trainer, pl_module: GAN) -> None:
        """Draws the images and writes the picture."""
        epoch = trainer.current_epoch
        if not trainer.is_global_zero or (epoch + 1) % self.every_n_epochs:
            return
        path = Path(trainer.log_dir or trainer.default_root_dir, "samples", f"epoch{epoch:03d}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = _grid(self._draw(pl_module), columns=10)
        write_png(path, picture.repeat_interleave(self.zoom, 0).repeat_interleave(self.zoom, 1))

    def _draw(self, module: GAN) -> Tensor:
        labels = torch.arange(10).repeat(self.rows)
        noise = torch.randn(len(labels), module.hparams.noise, generator=torch.Generator().manual_seed(self.seed))
        # Drawing does not change the statistics of batches.
        module.eval()
        with torch.no_grad():
            images = module(noise.to(module.device, module.dtype), labels.to(module.device))
        module.train()
        return images.cpu()


def _grid(images: Tensor, columns: int) -> Tensor:
    """Returns the images (count, 1, size, size), from -1 to 1, side by side as bytes, each with a dark margin."""
    bytes_of_images = ((images + 1) * 127.5).round().to(torch.uint8)
    framed = torch.nn.functional.pad(bytes_of_images.squeeze(1), (1, 1, 1, 1))
    rows = framed.unflatten(0, (-1, columns))
    return torch.cat([torch.cat(list(row), dim=1) for row in rows])
