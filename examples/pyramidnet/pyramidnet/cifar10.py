"""CIFAR-10's binary format.

A record is a byte for the label and 3072 for the image: 32 rows of 32 red pixels, then the green, then the blue ones.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from equipoise import ConfigurationError

__all__ = ["TEST_FILES", "TRAINING_FILES", "read_cifar10"]

TRAINING_FILES = [f"data_batch_{number}.bin" for number in range(1, 6)]
TEST_FILES = ["test_batch.bin"]
_CLASSES = 10
_IMAGE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32


def read_cifar10(folder: str | Path, names: list[str]) -> tuple[Tensor, Tensor]:
    """Reads images and labels from files in CIFAR-10's binary format.

    Args:
        folder: The folder of the files.
        names: Their names, such as `TRAINING_FILES`.

    Returns:
        The images, bytes (images, 3, 32, 32), and the labels, (images,).

    Raises:
        ConfigurationError: If files are missing, or if the size or a label shows that a file is not in this format, or
            is cut off.
    """
    folder = Path(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        there = ", ".join(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else "no such folder"
        raise ConfigurationError(
            f"{', '.join(missing)} of CIFAR-10's binary version must be in {folder} ({there}). Name the folder by"
            " data.root=FOLDER."
        )
    records = torch.cat([_read_records(folder / name) for name in names])
    return records[:, 1:].reshape(-1, *_IMAGE), records[:, 0].long()


def _read_records(path: Path) -> Tensor:
    content = np.fromfile(path, dtype=np.uint8)
    if len(content) == 0 or len(content) % _RECORD:
        raise ConfigurationError(
            f"{path} has {len(content)} bytes, but CIFAR-10's binary format has {_RECORD} for each image. Copy it"
            " again, and unpack it if it is compressed."
        )
    records = content.reshape(-1, _RECORD)
    largest = records[:, 0].max()
    if largest >= _CLASSES:
        raise ConfigurationError(
            f"{path} is not in CIFAR-10's binary format: it has the label {largest}, labels are 0 to 9."
        )
    return torch.from_numpy(records)
