"""The cut of a network between the layers of a stack."""

from collections.abc import Sequence
from dataclasses import replace

from equipoise.extensions.pipeline.planning.block_merging import add_rest
from equipoise.extensions.pipeline.planning.cut import Cut, CutOptions, public_name
from equipoise.extensions.pipeline.planning.measured_cut import predict_cut
from equipoise.extensions.pipeline.planning.stage_costs import Block
from equipoise.extensions.pipeline.stack.layer_stack import LayerStack
from equipoise.extensions.pipeline.stack.stack_profile import StackProfile

__all__ = ["cut_stack", "cut_stack_by_names", "stages_of_layers"]


def cut_stack(
    stack: LayerStack,
    profile: StackProfile,
    options: CutOptions,
    prefix: str,
    samples: int | None,
    rest: Block | None = None,
) -> Cut:
    """Return the best cut between the layers of a stack.

    Args:
        stack: The stack, with as many layers as stages or more.
        profile: Its costs.
        options: The user's options.
        prefix: The network's name in the user's module; empty if it is that module.
        samples: Number of samples of the measured micro-batch; None if it is unknown.
        rest: Costs of what a step computes after the network's call. Default: that does not count.

    Raises:
        ConfigurationError: If no cut fits into memory.
    """
    # The last stage also computes the loss.
    blocks = profile.blocks
    beside = None
    if rest is not None:
        blocks = add_rest(blocks, rest)
        beside = rest.seconds
    prediction = predict_cut(blocks, options)
    return replace(
        _cut_at(stack, prediction.ends, prefix),
        stages=prediction.stages,
        idle=prediction.idle,
        samples=samples,
        peaks=prediction.peaks,
        beside=beside,
    )


def cut_stack_by_names(stack: LayerStack, names: Sequence[str], prefix: str) -> Cut | None:
    """Return the cut before layers of a stack; None if these are no layers of it, in their order.

    Args:
        stack: The stack.
        names: For each stage but the first the name of the layer with which it begins, in the user's module.
        prefix: The network's name in the user's module; empty if it is that module.
    """
    # The first stage begins with the input, so no name may be that of the first layer.
    public_names = [public_name(name, True, prefix) for name in stack.names]
    ends = []
    for name in names:
        if name not in public_names:
            return None
        ends.append(public_names.index(name))
    if ends != sorted(set(ends)) or 0 in ends:
        return None
    return _cut_at(stack, [*ends, len(stack.names)], prefix)


def _cut_at(stack: LayerStack, ends: Sequence[int], prefix: str) -> Cut:
    """Return a cut without predictions."""
    first_layers = ["", *(public_name(stack.names[end], True, prefix) for end in ends[:-1])]
    return Cut(ends=list(ends), first_blocks=first_layers, first_calls=first_layers, stages=[], idle=None)


def stages_of_layers(cut: Cut) -> list[int]:
    """Return the stage of each layer.

    Args:
        cut: A cut between the layers of a stack.

    Example:
        >>> stages_of_layers(Cut(ends=[1, 3], first_blocks=["", "1"], first_calls=["", "1"], stages=[], idle=None))
        [0, 1, 1]
    """
    stages = []
    begin = 0
    for stage, end in enumerate(cut.ends):
        stages += [stage] * (end - begin)
        begin = end
    return stages
