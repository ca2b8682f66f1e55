"""Files of images in MNIST's format."""

import gzip

import torch

__all__ = ["write_idx"]


def write_idx(path, values):
    """A tensor of bytes in the idx format."""
    header = bytes([0, 0, 8, values.dim()]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    content = header + values.to(torch.uint8).numpy().tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
