"""Parts of sequences compared with whole ones before the first step: the loss and all gradients of the first batch.

What sees several positions without torch's attention computes another function on parts, without an error: attention
that is written by hand, a convolution, positions that are counted from the length of the input.
"""

from typing import ClassVar

from equipoise.extensions.fsdp.mesh.layer_comparison import Difference, LayerComparison

__all__ = ["BlockSequenceComparison", "CutSequenceComparison", "SequenceComparison"]


class SequenceComparison(LayerComparison):
    """Compares sequences that are divided over rows of processes with whole ones, once in a fit."""

    parts: ClassVar[str] = "parts of sequences"
    wholes: ClassVar[str] = "whole sequences"
    sees_all: ClassVar[bool] = False

    def advice(self, loss: Difference, worst: Difference) -> str:
        """Return what to do about parts that compute something else."""
        return (
            "Each process has some positions alone. Take positions from `position_ids` of the batch rather than from"
            " the length of the input, shift labels in the data rather than in the step, and compute attention by"
            " torch's `scaled_dot_product_attention` or `nn.MultiheadAttention`. Other layers that see several"
            " positions, such as convolutions, and losses that are no mean over positions, need whole sequences: name"
            " the blocks around them in FSDPStrategy(context_blocks=[...]), or leave context out."
        )


class BlockSequenceComparison(SequenceComparison):
    """Compares blocks that compute parts of sequences, between layers that have whole ones, with whole sequences."""

    def advice(self, loss: Difference, worst: Difference) -> str:
        """Return what to do about blocks that compute something else."""
        return (
            "Within the blocks of `context_blocks` each process has some positions alone. Let blocks receive tensors"
            " batch first, compute attention by torch's `scaled_dot_product_attention` or `nn.MultiheadAttention`, and"
            " give what depends on positions to each block as an argument. Layers that see several positions in another"
            " way, such as convolutions, belong outside of the blocks: name lists without them, or leave context out."
        )


class CutSequenceComparison(SequenceComparison):
    """Compares cut layers, which compute divided sequences, with whole layers that compute whole sequences."""

    parts: ClassVar[str] = "cut layers on parts of sequences"
    wholes: ClassVar[str] = "whole layers on whole sequences"

    def advice(self, loss: Difference, worst: Difference) -> str:
        """Return how to find out which of both computes something else."""
        return (
            "Leave `tensor` out, and after that `context` in its place: one of these runs is refused as well, and its"
            " error says what to change."
        )
