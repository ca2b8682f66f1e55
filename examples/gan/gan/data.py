"""The data: scikit-learn's digits, which need no files, or MNIST's training images from a folder."""

from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from gan.idx import find_idx, read_idx

__all__ = ["DigitsDataModule", "MNISTDataModule"]


class DigitsDataModule(LightningDataModule):
    """scikit-learn's 1,797 digits of 8 by 8 pixels.

    Args:
        batch_size: Images per batch. Default: 64.
    """

    def __init__(self, *, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def read(self) -> tuple[Tensor, Tensor]:
        """Returns the images (images, size, size), from 0 to 1, and their labels (images,)."""
        digits = load_digits()
        return torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target)

    def setup(self, stage: str) -> None:
        """Reads the images. Their values become those that the generator draws: from -1 to 1."""
        images, labels = self.read()
        self.images = TensorDataset(images.unsqueeze(1) * 2 - 1, labels)

    def train_dataloader(self) -> DataLoader:
        """Full batches, shuffled anew every epoch."""
        return DataLoader(self.images, batch_size=self.batch_size, shuffle=True, drop_last=True)


class MNISTDataModule(DigitsDataModule):
    """MNIST's 60,000 training images of 28 by 28 pixels, from its idx files, compressed or not.

    Args:
        root: The folder of the files.
        batch_size: Images per batch. Default: 64.
    """

    def __init__(self, *, root: str | Path, batch_size: int = 64) -> None:
        super().__init__(batch_size=batch_size)
        self.root = root

    def read(self) -> tuple[Tensor, Tensor]:
        """Returns the images (images, size, size), from 0 to 1, and their labels (images,)."""
        images = read_idx(find_idx(self.root, "train-images-idx3-ubyte"))
        labels = read_idx(find_idx(self.root, "train-labels-idx1-ubyte"))
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images but {len(labels)} labels in {self.root}.")
        return images / 255, labels.long()
