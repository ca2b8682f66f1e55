"""Parts of sequences compared with whole ones before the first step: the loss and all gradients of the first batch.

What sees several positions without torch's attention computes another function on parts, without an error: attention
that is written by hand, a convolution, positions that are counted from the length of the input.
"""

from equipoise.extensions.fsdp.mesh.layer_comparison import Sides

__all__ = ["BLOCKS", "CUT_SEQUENCES", "SEQUENCES"]

# Sequences that are divided over rows of processes.
SEQUENCES = Sides(
    parts="parts of sequences",
    wholes="whole sequences",
    advice="Each process has some positions alone. Take positions from `position_ids` of the batch rather than from"
    " the length of the input, shift labels in the data rather than in the step, and compute attention by"
    " torch's `scaled_dot_product_attention` or `nn.MultiheadAttention`. Other layers that see several"
    " positions, such as convolutions, and losses that are no mean over positions, need whole sequences: name"
    " the blocks around them in FSDPStrategy(context_blocks=[...]), or leave context out.",
)

# Blocks that compute parts of sequences, between layers that have whole ones.
BLOCKS = SEQUENCES._replace(
    advice="Within the blocks of `context_blocks` each process has some positions alone. Let blocks receive tensors"
    " batch first, compute attention by torch's `scaled_dot_product_attention` or `nn.MultiheadAttention`, and"
    " give what depends on positions to each block as an argument. Layers that see several positions in another"
    " way, such as convolutions, belong outside of the blocks: name lists without them, or leave context out.",
)

# Cut layers that compute divided sequences.
CUT_SEQUENCES = Sides(
    parts="cut layers on parts of sequences",
    wholes="whole layers on whole sequences",
    advice="Leave `tensor` out, and after that `context` in its place: one of these runs is refused as well, and its"
    " error says what to change.",
)
