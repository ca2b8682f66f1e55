"""Lengths of samples: checked, and rounded so that similar ones count as equal."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.errors import ConfigurationError

__all__ = ["checked_lengths", "rounded_up"]


def checked_lengths(lengths: Sequence[int] | Tensor, multiple: int) -> Tensor:
    """Return lengths as a tensor, rounded up to a multiple.

    Args:
        lengths: The argument of the user.
        multiple: The multiple, from 1.

    Raises:
        ConfigurationError: If they are not whole numbers from 1.
    """
    tensor = _whole_numbers(lengths)
    # The message names the shortest sample.
    index = int(tensor.argmin())
    shortest = int(tensor[index])
    if shortest < 1:
        raise ConfigurationError(f"Sample {index} has {shortest} tokens. Leave such samples out.")
    # Divide and round up.
    return (tensor + multiple - 1) // multiple * multiple


def _whole_numbers(lengths: Sequence[int] | Tensor) -> Tensor:
    """Return a sequence of whole numbers as a tensor on the CPU.

    Raises:
        ConfigurationError: If it is another object, or empty.
    """
    wrong = f"lengths is a sequence with the number of tokens of each sample, not a {type(lengths).__name__}"
    try:
        tensor = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        # Texts, None, or sequences of unequal lengths.
        raise ConfigurationError(f"{wrong}: {error}.") from error
    has_fractions = tensor.is_floating_point() or tensor.is_complex()
    is_whole = not has_fractions and tensor.dtype != torch.bool
    is_filled_list = tensor.ndim == 1 and len(tensor) > 0
    if not is_whole or not is_filled_list:
        raise ConfigurationError(f"{wrong} of shape {list(tensor.shape)} and type {tensor.dtype}.")
    return tensor.to("cpu", torch.int64)


def rounded_up(
    lengths: Tensor,
    spread: float,
    limit: int,
) -> Tensor:
    """Round each length up to the longest one of its band; lengths of a band differ by a share at most.

    Args:
        lengths: The lengths.
        spread: The share, above 0.
        limit: Lengths up to this one are rounded to it at most.

    Example:
        >>> rounded_up(torch.tensor([11, 12, 20]), spread=0.2, limit=100)
        tensor([12, 12, 20])
    """
    # 1. The longest one of each band. A dictionary, as a small share makes more bands than an array could hold.
    bands: list[float] = (lengths.double().log() / math.log1p(spread)).floor().tolist()
    longest: dict[float, int] = {}
    for band, length in zip(bands, lengths.tolist(), strict=True):
        longest[band] = max(length, longest.get(band, 0))

    # 2. A sample that fits must not be counted as one that does not.
    rounded = torch.tensor([longest[band] for band in bands])
    return torch.where(lengths <= limit, rounded.clamp(max=limit), rounded)
