"""Merge the blocks of a network, so that few places for a cut are left."""

from collections.abc import Sequence
from dataclasses import replace

from equipoise.extensions.pipeline.planning.stage_costs import Block

__all__ = ["merge_blocks"]

# Where a cut is allowed, a block takes at least this fraction (1 / _FINEST) of an average stage's time.
_FINEST = 200


def merge_blocks(blocks: Sequence[Block], stages: int = 2) -> tuple[list[Block], list[int]]:
    """Merge calls until each block takes a noticeable part of the time.

    A cut where no module begins stays possible only if the blocks on both sides take such a part.

    Args:
        blocks: A block for each call.
        stages: Number of stages. Default: 2.

    Returns:
        The merged blocks, and for each the index of the call after its last.
    """
    most_blocks = stages * _FINEST
    least_seconds = sum(block.seconds for block in blocks) / most_blocks
    has_few_blocks = len(blocks) <= most_blocks

    merged: list[Block] = []
    ends: list[int] = []
    # The block that grows: the index of its first call, and its seconds.
    first = 0
    seconds = 0.0
    for index, block in enumerate(blocks):
        seconds += block.seconds
        end = index + 1
        # Calls after the last cut always form a block.
        if end < len(blocks):
            is_long_enough = has_few_blocks or seconds >= least_seconds
            if not is_long_enough or not block.may_end:
                continue
            following = blocks[end]
            if not following.named and min(seconds, following.seconds) < least_seconds:
                continue
        merged.append(_merged(blocks[first:end]))
        ends.append(end)
        first = end
        seconds = 0.0
    return merged, ends


def _merged(blocks: Sequence[Block]) -> Block:
    last = blocks[-1]
    saves: set[int] = set()
    for block in blocks:
        saves |= block.saves
    return replace(
        blocks[0],
        forward=sum(block.forward for block in blocks),
        backward=sum(block.backward for block in blocks),
        parameters=sum(block.parameters for block in blocks),
        trained=sum(block.trained for block in blocks),
        saved=sum(block.saved for block in blocks),
        left=sum(block.left for block in blocks),
        saves=frozenset(saves),
        boundary=last.boundary,
        passing=last.passing,
        transient=max(block.transient for block in blocks),
        may_end=last.may_end,
    )
