"""The data: CIFAR-10 or MNIST from a folder, with the article's augmentation of the training images."""

from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pyramidnet.cifar10 import TEST_FILES, TRAINING_FILES, read_cifar10
from pyramidnet.idx import find_idx, read_idx

__all__ = ["CIFAR10DataModule", "MNISTDataModule", "NormalizedImages"]

_MARGIN = 4


class NormalizedImages(Dataset):
    """Images that are read, augmented and normalised by batches.

    Args:
        images: Bytes, (images, channels, 32, 32). One channel becomes three equal ones.
        labels: Their classes, (images,).
        mean: Mean of each channel, between 0 and 1.
        deviation: Standard deviation of each channel.
        crop: Moves each image by up to four pixels in each direction, anew each time.
        flip: Mirrors half of the images, others each time.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        mean: Sequence[float],
        deviation: Sequence[float],
        *,
        crop: bool = False,
        flip: bool = False,
    ) -> None:
        self.images, self.labels, self.crop, self.flip = images, labels, crop, flip
        self.mean = torch.tensor(mean).view(1, -1, 1, 1)
        self.deviation = torch.tensor(deviation).view(1, -1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Returns a whole batch, which is much quicker than image by image; a DataLoader calls it."""
        images = self.images[indices]
        if self.crop:
            images = _cropped(images)
        if self.flip:
            is_mirrored = torch.rand(len(images)) < 0.5
            images = torch.where(is_mirrored.view(-1, 1, 1, 1), images.flip(3), images)
        images = (images / 255 - self.mean) / self.deviation
        return images.expand(-1, 3, -1, -1), self.labels[indices]


def _cropped(images: Tensor) -> Tensor:
    """Adds a black margin, and cuts a part of the former size out of each image."""
    count, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, (_MARGIN,) * 4)
    rows = torch.randint(2 * _MARGIN + 1, (count, 1)) + torch.arange(height)
    columns = torch.randint(2 * _MARGIN + 1, (count, 1)) + torch.arange(width)
    return padded[
        torch.arange(count).view(-1, 1, 1, 1),
        torch.arange(channels).view(1, -1, 1, 1),
        rows.view(count, 1, height, 1),
        columns.view(count, 1, 1, width),
    ]


class _Images(LightningDataModule):
    """Training, validation and test images of one source.

    Args:
        root: The folder.
        batch_size: Images per training batch. Default: 128.
        val_images: Training images kept for validation, without augmentation. Default: 5,000.
        split_seed: Which ones; they stay the same whatever the run's own seed. Default: 0.
        workers: Processes that read and augment. Default: 0, the process itself.
    """

    MEAN: tuple[float, ...]
    DEVIATION: tuple[float, ...]
    MAY_FLIP: bool

    def __init__(
        self, *, root: str | Path, batch_size: int = 128, val_images: int = 5000, split_seed: int = 0, workers: int = 0
    ) -> None:
        super().__init__()
        self.root, self.batch_size, self.workers = root, batch_size, workers
        self.val_images, self.split_seed = val_images, split_seed

    def read(self, stage: str) -> tuple[Tensor, Tensor]:
        """Returns the images (images, channels, 32, 32) and labels for "train" or "test"."""
        raise NotImplementedError

    def setup(self, stage: str) -> None:
        """Reads what the stage needs."""
        if stage in ("fit", "validate"):
            images, labels = self.read("train")
            if not 0 < self.val_images < len(images):
                raise ValueError(f"val_images={self.val_images} must leave some of the {len(images)} training images.")
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.split_seed))
            val, train = order[: self.val_images], order[self.val_images :]
            self.train = NormalizedImages(
                images[train], labels[train], self.MEAN, self.DEVIATION, crop=True, flip=self.MAY_FLIP
            )
            self.val = NormalizedImages(images[val], labels[val], self.MEAN, self.DEVIATION)
        else:
            self.test = NormalizedImages(*self.read("test"), self.MEAN, self.DEVIATION)

    def train_dataloader(self) -> DataLoader:
        """Training batches, shuffled anew every epoch."""
        return self._loader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Validation batches."""
        return self._loader(self.val, 500)

    def test_dataloader(self) -> DataLoader:
        """Batches of the test images."""
        return self._loader(self.test, 500)

    def predict_dataloader(self) -> DataLoader:
        """The test images once more, to look at what the model makes of them."""
        return self.test_dataloader()

    def _loader(self, images: NormalizedImages, batch_size: int, shuffle: bool = False) -> DataLoader:
        return DataLoader(
            images, batch_size=batch_size, shuffle=shuffle, num_workers=self.workers, collate_fn=_as_it_is
        )


def _as_it_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


class CIFAR10DataModule(_Images):
    """CIFAR-10 in its binary version: `data_batch_1.bin` to `data_batch_5.bin`, and `test_batch.bin`."""

    MEAN = (0.4914, 0.4822, 0.4465)
    DEVIATION = (0.2023, 0.1994, 0.2010)
    MAY_FLIP = True

    def read(self, stage: str) -> tuple[Tensor, Tensor]:
        """Returns the images and labels for "train" or "test"."""
        return read_cifar10(self.root, TRAINING_FILES if stage == "train" else TEST_FILES)


class MNISTDataModule(_Images):
    """MNIST's four idx files, compressed or not; images get a black margin that makes them 32 by 32.

    Digits are not mirrored: most of them would be no digits any more.
    """

    MEAN = (0.1,)
    DEVIATION = (0.28,)
    MAY_FLIP = False

    def read(self, stage: str) -> tuple[Tensor, Tensor]:
        """Returns the images and labels for "train" or "test"."""
        part = "train" if stage == "train" else "t10k"
        images = read_idx(find_idx(self.root, f"{part}-images-idx3-ubyte"))
        labels = read_idx(find_idx(self.root, f"{part}-labels-idx1-ubyte"))
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images but {len(labels)} labels for {part!r} in {self.root}.")
        missing = 32 - images.shape[-1]
        images = torch.nn.functional.pad(images, (missing // 2, missing - missing // 2) * 2)
        return images.unsqueeze(1), labels.long()
