"""Digests of tensors: one number for all bits of each, computed where the tensor is, without waiting for it.

The bits are read as integers of 64 bits. Each is mixed and multiplied by an odd factor of its place; the sum of them,
modulo 2**64, depends on no order of the additions. So a change of a single element always shows, changes of several but
for a chance of about 2**-64, and NaN counts by its bits.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["digests_of", "has_digest"]

# Odd, with about as many bits that are set as not; it is the golden ratio times 2**64.
_FACTOR = -7046029254386353131
_LANE = 8  # bytes
# Bytes that are computed at a time: what the cache of a core holds, or what keeps a GPU busy.
_CHUNK_ON_CPU = 1 << 19
_CHUNK = 1 << 25

# The number of a tensor, and some of its bytes.
Piece = tuple[int, Tensor]


def has_digest(tensor: Tensor) -> bool:
    """Return True if a tensor has values in dense memory; others, such as sparse ones, have no digest."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_meta or tensor.is_quantized:
        return False
    # Classes of tensors that consist of others have this method, which torch documents for them.
    return not hasattr(tensor, "__tensor_flatten__")


@torch.no_grad()
def digests_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digest of each tensor, as int64 on the device of the first.

    Args:
        tensors: Tensors of any dtype and shape, for which `has_digest` is true.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    device = tensors[0].device
    # Tensors without elements keep this one.
    empty = torch.zeros((), dtype=torch.int64, device=device)
    digests = [empty] * len(tensors)
    factors = empty.new_empty(0)
    for chunk in _chunks(tensors):
        # 1. The bytes as integers, and a factor for each place.
        lanes, lengths = _lanes([content for _, content in chunk])
        count = lanes.numel()
        if factors.numel() < count or factors.device != lanes.device:
            factors = torch.arange(count, device=lanes.device)
            factors *= _FACTOR
            factors |= 1

        # 2. Their sums. The order of a tensor's chunks counts, too.
        sums = _sums(lanes, lengths, factors[:count])
        sums = sums.to(device)
        for (number, _), term in zip(chunk, sums.unbind(), strict=True):
            before = digests[number]
            if before is not empty:
                term = term + before * _FACTOR
            digests[number] = term
    return torch.stack(digests)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Piece]]:
    """Yield the bytes of tensors in chunks, each of which lies on one device."""
    chunk: list[Piece] = []
    device = tensors[0].device
    size = 0
    for number, tensor in enumerate(tensors):
        limit = _CHUNK
        if tensor.device.type == "cpu":
            limit = _CHUNK_ON_CPU
        for piece in _pieces(tensor, limit):
            length = piece.numel()
            is_full = size + length > limit
            is_elsewhere = piece.device != device
            if chunk and (is_full or is_elsewhere):
                yield chunk
                chunk = []
                size = 0
            device = piece.device
            size += length
            chunk.append((number, piece))
    if chunk:
        yield chunk


def _pieces(tensor: Tensor, limit: int) -> Sequence[Tensor]:
    """Return the bytes of a tensor in pieces; none of a tensor without elements."""
    values = tensor.resolve_conj()
    values = values.resolve_neg()
    values = values.contiguous()
    content = values.reshape(-1).view(torch.uint8)
    length = content.numel()
    if length == 0:
        return []
    if length <= limit:
        return [content]
    return torch.split(content, limit)


def _lanes(pieces: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Return the bytes of a chunk as integers, each piece filled up with zeros, and the number of integers of each."""
    # 1. A piece of a large tensor needs no copy.
    first = pieces[0]
    length = first.numel()
    offset = first.storage_offset()
    is_alone = len(pieces) == 1
    is_aligned = length % _LANE == 0 and offset % _LANE == 0
    if is_alone and is_aligned:
        return first.view(torch.int64), [length // _LANE]

    # 2. Small tensors are joined.
    zeros = first.new_zeros(_LANE)
    padded = []
    lengths = []
    for piece in pieces:
        length = piece.numel()
        missing = -length % _LANE
        padded.append(piece)
        if missing:
            padded.append(zeros[:missing])
        lengths.append((length + missing) // _LANE)
    return torch.cat(padded).view(torch.int64), lengths


def _sums(lanes: Tensor, lengths: list[int], factors: Tensor) -> Tensor:
    """Return the sum of each piece of a chunk."""
    # Mixed, since a factor moves no bit down: signs that differ in two places would cancel out.
    terms = lanes >> 29
    terms ^= lanes
    terms *= factors
    # Integers overflow without a loss, so differences of the running sum are exact.
    running = terms.cumsum(0)
    ends = torch.stack([part[-1] for part in torch.split(running, lengths)])
    return ends.diff(prepend=running.new_zeros(1))
