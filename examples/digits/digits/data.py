"""The data: 1,797 digits written by 43 people, in three parts that have no image in common."""

import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["DigitsDataModule"]


class DigitsDataModule(LightningDataModule):
    """scikit-learn's handwritten digits; they come with the package, nothing is downloaded.

    Args:
        batch_size: Images per batch. Default: 64.
        val_share: The share of all images to validate on, between 0 and 1. Default: 0.15.
        test_share: The share of all images held out for the test, between 0 and 1. Default: 0.2.
        split_seed: Which images go where; the parts stay the same whatever the run's own seed. Default: 0.
    """

    def __init__(
        self, *, batch_size: int = 64, val_share: float = 0.15, test_share: float = 0.2, split_seed: int = 0
    ) -> None:
        super().__init__()
        self.batch_size, self.val_share, self.test_share, self.split_seed = (
            batch_size,
            val_share,
            test_share,
            split_seed,
        )

    def setup(self, stage: str) -> None:
        """Splits the images, every digit by the same shares."""
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16  # grey levels from 0 to 16
        labels = torch.from_numpy(digits.target)
        rest, test = train_test_split(
            range(len(labels)), test_size=self.test_share, stratify=labels, random_state=self.split_seed
        )
        train, val = train_test_split(
            rest, test_size=self.val_share / (1 - self.test_share), stratify=labels[rest], random_state=self.split_seed
        )
        self.train, self.val, self.test = (TensorDataset(images[part], labels[part]) for part in (train, val, test))

    def train_dataloader(self) -> DataLoader:
        """Training batches, shuffled anew every epoch."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Validation batches."""
        return DataLoader(self.val, batch_size=256)

    def test_dataloader(self) -> DataLoader:
        """Batches held out from training and from the choice of a checkpoint."""
        return DataLoader(self.test, batch_size=256)

    def predict_dataloader(self) -> DataLoader:
        """The held-out images once more, to look at what the model makes of them."""
        return self.test_dataloader()
