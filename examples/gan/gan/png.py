"""Grey pictures as PNG files, without a library for images."""

import struct
import zlib
from pathlib import Path

from torch import Tensor

__all__ = ["write_png"]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_BITS = 8
_GREY = 0
# The standard compression, the standard set of filters, no interlacing.
_METHODS = (0, 0, 0)


def write_png(path: str | Path, picture: Tensor) -> None:
    """Writes a picture.

    Args:
        path: The file.
        picture: Grey levels as bytes, (height, breadth), from 0 for black to 255 for white.
    """
    height, breadth = picture.shape
    header = struct.pack(">IIBBBBB", breadth, height, _BITS, _GREY, *_METHODS)
    # Each row begins with the number of its filter; 0 leaves the bytes as they are.
    rows = b"".join(b"\0" + row.tobytes() for row in picture.numpy())
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows, level=9)), (b"IEND", b"")]
    Path(path).write_bytes(_SIGNATURE + b"".join(_chunk(name, content) for name, content in chunks))


def _chunk(name: bytes, content: bytes) -> bytes:
    check_sum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check_sum)
