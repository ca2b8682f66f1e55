"""The data: scikit-learn's digits, few of them for training, so that a single classifier is often wrong."""

import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["FewDigitsDataModule"]


class FewDigitsDataModule(LightningDataModule):
    """Some of scikit-learn's 1,797 digits for training, and the rest for the test.

    Args:
        train_images: Images for training. Default: 300.
        batch_size: Images per batch. Default: 32.
        split_seed: Which images go where; they stay the same whatever the run's own seed. Default: 0.
    """

    def __init__(self, *, train_images: int = 300, batch_size: int = 32, split_seed: int = 0) -> None:
        super().__init__()
        self.train_images, self.batch_size, self.split_seed = train_images, batch_size, split_seed

    def setup(self, stage: str) -> None:
        """Splits the images, every digit by the same share."""
        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(
            torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16,
            torch.from_numpy(labels),
            train_size=self.train_images,
            stratify=labels,
            random_state=self.split_seed,
        )
        train_images, test_images, train_labels, test_labels = parts
        self.train = TensorDataset(train_images, train_labels)
        self.test = TensorDataset(test_images, test_labels)

    def train_dataloader(self) -> DataLoader:
        """Training batches, shuffled anew every epoch."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader:
        """Batches held out from training."""
        return DataLoader(self.test, batch_size=500)
