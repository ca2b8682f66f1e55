"""Traits of torch's operations that decide which answers of a forward hold for other calls."""

from enum import Flag, auto
from functools import cache
from typing import Any

import torch

from equipoise.tree import tensors_in

__all__ = ["Traits", "traits_of"]


class Traits(Flag):
    """Traits of an operation.

    Attributes:
        RANDOM: It draws random numbers.
        DYNAMIC: Sizes of its results depend on values, or it hands values to Python.
    """

    RANDOM = auto()
    DYNAMIC = auto()


# Operations with dynamic sizes that have no tag in torch.
_DYNAMIC = {"_coalesce", "_pack_padded_sequence", "_pad_packed_sequence", "_to_sparse", "coalesce", "to_sparse"}
# Types of tensors that act as masks where they are an index.
_MASKS = (torch.bool, torch.uint8)


def traits_of(name: str, args: Any) -> Traits:
    """Return the traits of an operation.

    Args:
        name: Name of the operation, such as "nonzero".
        args: Its positional arguments.
    """
    if name != "index":
        return _traits_of_name(name)
    # An index by numbers has the sizes of these numbers. With a mask the sizes depend on its values.
    has_mask = any(index.dtype in _MASKS for index in tensors_in(args[1:]))
    if has_mask:
        return Traits.DYNAMIC
    return Traits(0)


@cache
def _traits_of_name(name: str) -> Traits:
    """Return the traits that all calls of an operation have."""
    traits = Traits(0)
    if name in _DYNAMIC:
        traits |= Traits.DYNAMIC
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        # An operation of a library may do anything.
        return Traits.RANDOM | Traits.DYNAMIC
    # Overloads of an operation share its name; here they also share their traits.
    for overload in packet.overloads():
        tags = getattr(packet, overload).tags
        if torch.Tag.nondeterministic_seeded in tags:
            traits |= Traits.RANDOM
        if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
            traits |= Traits.DYNAMIC
    return traits
