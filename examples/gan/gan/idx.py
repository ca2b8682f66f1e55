"""The idx format: a magic number, the sizes of the dimensions, then the values, all big-endian.

0 0 TYPE DIMENSIONS    SIZE ... (4 bytes each)    VALUES
"""

import gzip
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["find_idx", "read_idx"]

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | Path) -> Tensor:
    """Reads an idx file, compressed by gzip or not.

    Args:
        path: The file.

    Returns:
        A tensor of the file's shape and type.

    Raises:
        ValueError: If it is no idx file, or is cut off.

    Example:
        >>> read_idx("t10k-labels-idx1-ubyte.gz").shape  # doctest: +SKIP
        torch.Size([10000])
    """
    content = Path(path).read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except EOFError:
            raise ValueError(f"{path} is cut off: its compressed data end early. Copy it again.") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise ValueError(f"{path} is no idx file: it begins with {content[:4]!r}, not with two zeros and a type.")
    dtype, dimensions = np.dtype(_TYPES[content[2]]), content[3]
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(content[4 * i : 4 * i + 4], "big") for i in range(1, 1 + dimensions))
    expected = start + dtype.itemsize * math.prod(shape)
    if len(content) != expected:
        raise ValueError(f"{path} is damaged: it has {len(content)} bytes, its header says {expected}. Copy it again.")
    values = np.frombuffer(content, dtype=dtype, offset=start).reshape(shape)
    return torch.from_numpy(values.astype(dtype.newbyteorder("=")))


def find_idx(folder: str | Path, name: str) -> Path:
    """Finds an idx file under the names it goes by: with or without `.gz`, `-idx` or `.idx`.

    Args:
        folder: Where to look.
        name: Its name as first published, such as `train-images-idx3-ubyte`.

    Raises:
        FileNotFoundError: If there is none; the message names what was looked for and what is there.
    """
    folder = Path(folder)
    names = [variant + end for variant in (name, name.replace("-idx", ".idx")) for end in ("", ".gz")]
    for candidate in names:
        if (folder / candidate).is_file():
            return folder / candidate
    there = ", ".join(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else "no such folder"
    raise FileNotFoundError(
        f"There is none of {', '.join(names)} in {folder} ({there}). Name the folder by data.root=FOLDER."
    )
