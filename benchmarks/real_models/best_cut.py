"""The best of all cuts into two stages, found by trying every place where one is allowed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from equipoise.extensions.pipeline.planning import measured_cut
from equipoise.extensions.pipeline.planning.stage_costs import Block

__all__ = ["MeasuredCalls", "best_to_mean", "calls_noted", "largest_piece"]


@dataclass
class MeasuredCalls:
    """The costs from which a cut was chosen.

    Attributes:
        calls: The calls of the network; empty before they are measured.
    """

    calls: list[Block] = field(default_factory=list)

    def notes(self) -> dict[str, Any]:
        """The best cut and the largest piece; empty if nothing was measured."""
        if not self.calls:
            return {}
        name, share = largest_piece(self.calls)
        return {"best_to_mean": best_to_mean(self.calls), "piece": name, "piece_to_mean": share}


@contextmanager
def calls_noted(into: MeasuredCalls) -> Iterator[None]:
    """Note the costs from which cuts are chosen within the context."""
    merge_blocks = measured_cut.merge_blocks

    def noting_calls(blocks: Sequence[Block], stages: int) -> Any:
        into.calls = list(blocks)
        return merge_blocks(blocks, stages)

    with mock.patch.object(measured_cut, "merge_blocks", noting_calls):
        yield


def best_to_mean(calls: Sequence[Block]) -> float:
    """The slower stage of the best cut into two, by the mean of both.

    Args:
        calls: The calls of a network.
    """
    total = sum(call.seconds for call in calls)
    slowest = total
    first_stage = 0.0
    for call in calls[:-1]:
        first_stage += call.seconds
        if call.may_end:
            slowest = min(slowest, max(first_stage, total - first_stage))
    return 2 * slowest / total


def largest_piece(calls: Sequence[Block]) -> tuple[str, float]:
    """The longest piece that no cut divides: the name of its longest call, and its time by the mean of two stages.

    Args:
        calls: The calls of a network.
    """
    total = sum(call.seconds for call in calls)
    name, longest = "", 0.0
    piece: list[Block] = []
    for index, call in enumerate(calls):
        piece.append(call)
        is_last = index == len(calls) - 1
        if not call.may_end and not is_last:
            continue
        seconds = sum(each.seconds for each in piece)
        if seconds > longest:
            longest = seconds
            name = max(piece, key=lambda each: each.seconds).name
        piece = []
    return name, 2 * longest / total
