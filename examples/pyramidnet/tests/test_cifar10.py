"""The reader of CIFAR-10's binary format."""

import pytest
import torch
from pyramidnet.cifar10 import TRAINING_FILES, read_cifar10

from equipoise import ConfigurationError

RECORD = 3073


def records(labels):
    """Images of one colour: red is the label, green 100, blue 200."""
    return b"".join(bytes([label]) + bytes([label] * 1024 + [100] * 1024 + [200] * 1024) for label in labels)


def test_files_in_order(tmp_path):
    for number, name in enumerate(TRAINING_FILES):
        (tmp_path / name).write_bytes(records([number, 9]))
    images, labels = read_cifar10(tmp_path, TRAINING_FILES)
    assert images.shape == (10, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert images[2].unique(dim=1).unique(dim=2).flatten().tolist() == [1, 100, 200]


def test_rows_come_before_columns(tmp_path):
    pixels = bytes(range(256)) * 12
    (tmp_path / "a.bin").write_bytes(bytes([3]) + pixels)
    images, _ = read_cifar10(tmp_path, ["a.bin"])
    assert images[0, 0, 0].tolist() == list(range(32))
    assert images[0, 0, 1, 0] == 32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a\.bin has 0 bytes.*3073 for each image"),
        (records([1])[:-1], r"has 3072 bytes"),
        (records([1, 2]) + b"\0", r"has 6147 bytes"),
        (records([1, 10]), r"label 10, labels are 0 to 9"),
    ],
    ids=["empty", "cut off", "too long", "label"],
)
def test_what_is_no_such_file(tmp_path, content, message):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        read_cifar10(tmp_path, ["a.bin"])


def test_missing_files_are_named_with_what_is_there(tmp_path):
    (tmp_path / "data_batch_1.bin").touch()
    with pytest.raises(ConfigurationError, match=r"^data_batch_2\.bin, .*\(data_batch_1\.bin\).*data\.root=FOLDER"):
        read_cifar10(tmp_path, TRAINING_FILES)
    with pytest.raises(ConfigurationError, match="no such folder"):
        read_cifar10(tmp_path / "nowhere", TRAINING_FILES)
