"""Calls of `pad_packed_sequence`, whose length follows from values of the packed sequence."""

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

__all__ = ["padded_call", "padding_frame"]


def padded_call(args: Sequence[Any], frame: FrameType | None) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Return a function that finds the length by itself, unless the user gives it, and its arguments.

    Args:
        args: The arguments of torch's operation, of which the last is the length.
        frame: A frame within the operation.
    """
    length = args[-1]
    caller = padding_frame(frame)
    if caller is not None:
        length_of_user = caller.f_locals.get("total_length")
        if length_of_user is None:
            # The length is that of the recorded values. Other values may have another one.
            length = None
    return padded, (*args[:-1], length)


def padded(
    data: Tensor,
    batch_sizes: Tensor,
    batch_first: bool,
    padding_value: float,
    length: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the padded tensor of a packed sequence, and the lengths.

    Args:
        data: Values of all sequences.
        batch_sizes: Number of sequences for each time.
        batch_first: True if the first dimension of the result is that of the sequences.
        padding_value: Value beyond the end of a sequence.
        length: Length of the result; None: that of the longest sequence.
    """
    sequence = PackedSequence(data, batch_sizes)
    return pad_packed_sequence(
        sequence,
        batch_first,
        padding_value,
        length,
    )


def padding_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of `pad_packed_sequence`; None if there is none."""
    while frame is not None:
        # The code is the same object in every call of the function.
        if frame.f_code is pad_packed_sequence.__code__:
            return frame
        frame = frame.f_back
    return None
