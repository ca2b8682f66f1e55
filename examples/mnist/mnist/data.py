"""The data: MNIST's training images, some of them kept for validation, and its test images."""

from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset, random_split

from mnist.idx import find_idx, read_idx

__all__ = ["MNISTDataModule"]


class MNISTDataModule(LightningDataModule):
    """MNIST, or any other images in its format, from a folder.

    The folder holds the four idx files, compressed or not: `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`,
    `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`. Nothing is downloaded.

    Args:
        root: The folder.
        batch_size: Images per training batch. Default: 128.
        val_images: Training images kept for validation. Default: 5,000.
        split_seed: Which ones; they stay the same whatever the run's own seed. Default: 0.
    """

    def __init__(self, *, root: str | Path, batch_size: int = 128, val_images: int = 5000, split_seed: int = 0) -> None:
        super().__init__()
        self.root, self.batch_size, self.val_images, self.split_seed = root, batch_size, val_images, split_seed

    def setup(self, stage: str) -> None:
        """Reads what the stage needs."""
        if stage in ("fit", "validate"):
            images = self._read("train")
            if not 0 < self.val_images < len(images):
                raise ValueError(f"val_images={self.val_images} must leave some of the {len(images)} training images.")
            generator = torch.Generator().manual_seed(self.split_seed)
            sizes = [len(images) - self.val_images, self.val_images]
            self.train, self.val = random_split(images, sizes, generator=generator)
        else:
            self.test = self._read("t10k")

    def train_dataloader(self) -> DataLoader:
        """Training batches, shuffled anew every epoch."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Validation batches."""
        return DataLoader(self.val, batch_size=1000)

    def test_dataloader(self) -> DataLoader:
        """Batches of the test images."""
        return DataLoader(self.test, batch_size=1000)

    def predict_dataloader(self) -> DataLoader:
        """The test images once more, to look at what the model makes of them."""
        return self.test_dataloader()

    def _read(self, part: str) -> TensorDataset:
        images = read_idx(find_idx(self.root, f"{part}-images-idx3-ubyte"))
        labels = read_idx(find_idx(self.root, f"{part}-labels-idx1-ubyte"))
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images but {len(labels)} labels for {part!r} in {self.root}.")
        return TensorDataset(images.unsqueeze(1), labels.long())
