"""A row of processes over which sequences are divided, and the exchange of their parts.

A sequence is cut into 2N pieces for N processes. Process r has the pieces r and 2N - 1 - r: under a causal mask early
positions see few keys and late ones many, so all processes have equal work.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from equipoise.errors import StepError

__all__ = ["SequenceRow"]


class SequenceRow:
    """The processes that have parts of the same sequences.

    Args:
        group: The processes, in the order of their parts.

    Attributes:
        group: The processes.
        size: Their number.
        rank: The number of this process among them.
        length: The number of positions of the sequences of the present batch. Default: 0, before the first one.
        sequences: Numbers of the sequences that are packed into each sample; (samples, all positions). Default: None,
            each sample is one.
        is_divided: Whether this process computes a part of a batch now. Default: False.
        has_padding: Whether the model that computes now was given a mask of keys. Default: True.
        ones: The mask of keys that a model received because it was given none. Default: None.
    """

    # What is known of the present batch; a row without a group has it, too.
    length = 0
    sequences: Tensor | None = None
    is_divided = False
    has_padding = True
    ones: Tensor | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def begin(self, length: int) -> None:
        """Begin a batch.

        Args:
            length: The number of positions of its sequences.
        """
        self.length = length
        self.sequences = None
        self.ones = None

    @contextmanager
    def divided(self) -> Iterator[None]:
        """Note that this process computes a part of a batch, in a `with` block."""
        self.is_divided = True
        try:
            yield
        finally:
            self.leave()

    def enter(self, length: int) -> None:
        """Note that this process computes parts from now on, until `leave`: for hooks, which have no `with` block.

        Args:
            length: The number of positions of the whole sequences.
        """
        self.begin(length)
        self.is_divided = True

    def leave(self) -> None:
        """Note that this process computes whole sequences from now on."""
        self.is_divided = False

    def __deepcopy__(self, memo: Any) -> "SequenceRow":
        # A copy of a module has hooks that refer to it.
        return self

    @property
    def part_length(self) -> int:
        """The number of positions that each process has, with repetitions of the last one where they do not divide."""
        return 2 * math.ceil(self.length / (2 * self.size))

    @property
    def piece_numbers(self) -> tuple[int, int]:
        """The numbers of the pieces of this process."""
        return self.rank, 2 * self.size - 1 - self.rank

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions in the whole sequence that this process has."""
        return self.own_part(torch.arange(self.length, device=device), 0)

    def own_part(self, whole: Tensor, dim: int) -> Tensor:
        """Return the part of this process.

        Args:
            whole: A tensor with all positions.
            dim: Their dimension.
        """
        missing = self.part_length * self.size - self.length
        if missing:
            # What is computed there is dropped. From zeros it would be NaN under some masks, and so would gradients.
            last = whole.narrow(dim, self.length - 1, 1)
            whole = torch.cat([whole, *[last] * missing], dim)
        pieces = whole.chunk(2 * self.size, dim)
        return torch.cat([pieces[number] for number in self.piece_numbers], dim)

    def check_whole(self, other: Tensor) -> None:
        """Check that attention to another sequence, which is not divided, takes no part of it for the divided one.

        Args:
            other: The other sequence: (samples, positions, channels), or its tokens.

        Raises:
            StepError: If it has as many positions as a part has.
        """
        is_sequence = other.ndim == 3 or (other.ndim == 2 and other.dtype in (torch.int32, torch.int64))
        if is_sequence and other.size(1) == self.part_length and self.part_length != self.length:
            raise StepError(
                f"A tensor of shape {list(other.shape)} is not divided, but has {self.part_length} positions, as many"
                f" as each process has of sequences of {self.length} (context={self.size}), so that attention to it"
                " would take it for a part of them. Pad it to another number of positions, and hide the padding by a"
                " mask."
            )

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Return a tensor with all positions, in their order; all processes call it together.

        Its gradient is the sum of the gradients of all processes.

        Args:
            part: The part of this process.
            dim: The dimension of positions.

        Raises:
            StepError: If it is a part of a cut layer's output as well.
        """
        if isinstance(part, DTensor):
            raise StepError(
                "Attention has received a DTensor, of which FSDPStrategy(context=...) cannot gather positions. Let the"
                " layers that `configure_model` cuts return plain tensors: use_local_output=True."
            )
        if part.dtype == torch.bool:
            # Not every backend exchanges truth values.
            return self.gather(part.to(torch.uint8), dim).bool()
        gathered: Tensor = _Gather.apply(part, dim, self)  # type: ignore[no-untyped-call]
        if gathered.size(dim) > self.length:
            return gathered.narrow(dim, 0, self.length)
        return gathered

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, without a graph."""
        here = tensor.detach().contiguous()
        gathered = [torch.empty_like(here) for _ in range(self.size)]
        dist.all_gather(gathered, here, group=self.group)
        return gathered

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum over the processes of what they have for this one, without a graph.

        Args:
            parts: The tensors that this process has for each of them.
        """
        summed = torch.empty_like(parts[0])
        dist.reduce_scatter(summed, list(parts), group=self.group)
        return summed

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes, without a graph."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def all_true(self, flags: Tensor) -> list[bool]:
        """Return for each flag whether it is true in all processes."""
        return [count == self.size for count in self.all_reduce(flags.to(torch.int32)).tolist()]


class _Gather(torch.autograd.Function):
    """Gathers the parts of all processes; the backward adds up their gradients, and returns the own part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, row: SequenceRow) -> Tensor:
        ctx.row = row
        ctx.dim = dim
        # Each process has a piece from the front and one from the back. The latter descend.
        halves = [other.chunk(2, dim) for other in row.all_gather(part)]
        front, back = zip(*halves, strict=True)
        return torch.cat([*front, *reversed(back)], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        pieces = gradient.chunk(2 * ctx.row.size, ctx.dim)
        parts = [torch.cat([pieces[rank], pieces[-1 - rank]], ctx.dim) for rank in range(ctx.row.size)]
        return ctx.row.reduce_scatter(parts), None, None
