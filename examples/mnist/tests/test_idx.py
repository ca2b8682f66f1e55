"""The reader of idx files."""

import gzip

import pytest
import torch
from mnist.idx import find_idx, read_idx

IMAGES = bytes([0, 0, 0x08, 3, *(0, 0, 0, 2), *(0, 0, 0, 1), *(0, 0, 0, 3), *range(250, 256)])


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_bytes(tmp_path, compress):
    (tmp_path / "images").write_bytes(compress(IMAGES))
    images = read_idx(tmp_path / "images")
    assert images.dtype == torch.uint8
    assert images.tolist() == [[[250, 251, 252]], [[253, 254, 255]]]


def test_wide_values_are_big_endian(tmp_path):
    (tmp_path / "values").write_bytes(bytes([0, 0, 0x0B, 1, 0, 0, 0, 2, 1, 2, 255, 254]))
    values = read_idx(tmp_path / "values")
    assert values.dtype == torch.int16
    assert values.tolist() == [258, -2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no idx file"),
        (b"PNG\0", "no idx file"),
        (b"\0\0\x07\1", "no idx file"),
        (IMAGES[:-1], "damaged"),
        (IMAGES + b"\0", "damaged"),
        (IMAGES[:9], "damaged"),
        (gzip.compress(IMAGES, mtime=0)[:-9], "cut off"),
    ],
)
def test_what_is_no_idx_file(tmp_path, content, message):
    (tmp_path / "images").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(tmp_path / "images")


@pytest.mark.parametrize("name", ["a-idx1-ubyte", "a-idx1-ubyte.gz", "a.idx1-ubyte"])
def test_names(tmp_path, name):
    (tmp_path / name).touch()
    assert find_idx(tmp_path, "a-idx1-ubyte") == tmp_path / name


def test_missing_file_says_what_is_there(tmp_path):
    (tmp_path / "other").touch()
    with pytest.raises(FileNotFoundError, match=r"a-idx1-ubyte\.gz.*\(other\).*data\.root"):
        find_idx(tmp_path, "a-idx1-ubyte")
