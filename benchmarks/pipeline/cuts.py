"""Quality of automatic cuts: beside the best possible one, and as their stages run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.graph.call_structure import CallStructure, NetworkCall
from equipoise.extensions.pipeline.graph.stages import StageProgram, make_stages, map_tensors
from equipoise.extensions.pipeline.planning.block_merging import merge_blocks
from equipoise.extensions.pipeline.planning.partition import choose_cuts
from equipoise.extensions.pipeline.planning.profile import profile_calls
from equipoise.extensions.pipeline.planning.stage_costs import Block, Costs, StageDevice
from equipoise.extensions.pipeline.recording.tracing import trace

__all__ = ["Found", "best_slowest", "cut_network"]

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A cut.

    Attributes:
        stages: The number of stages.
        begins: What each but the first begins with.
        to_mean: The slowest stage by the mean, as measured.
        to_best: The slowest stage by that of the best cut, both as measured.
        best_to_mean: The slowest stage of the best cut by the mean.
        ran: The slowest stage by the mean, as stages ran.
        choosing: Seconds to choose.
    """

    stages: int
    begins: list[str]
    to_mean: float
    to_best: float
    best_to_mean: float
    ran: float
    choosing: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A network, measured once.

    Attributes:
        calls: How many there are.
        seconds: How long that took; `step`: how long a forward and backward of the micro-batch take.
        found: For each number of stages the cut.
    """

    calls: int
    seconds: float
    step: float
    found: list[Found]


def cut_network(network: nn.Module, batch: Tensor, counts: Sequence[int], rounds: int) -> Measured:
    """Measures a network, cuts it into so many stages, and runs them.

    Args:
        network: The network.
        batch: A micro-batch.
        counts: The numbers of stages.
        rounds: How often stages run.
    """
    call = NetworkCall(network, network.forward, CallStructure((batch,), {}), network, batch.device)
    traced = trace(call)
    begin = time.perf_counter()
    calls = profile_calls(traced, network, [batch], CPU)
    seconds = time.perf_counter() - begin
    whole = sum(block.forward + block.backward for block in calls)
    found = []
    for count in counts:
        begin = time.perf_counter()
        blocks, ends_of_blocks = merge_blocks(calls, count)
        chosen = choose_cuts(Costs(blocks, [StageDevice()] * count, micro_batches=2 * count))
        choosing = time.perf_counter() - begin
        slowest = max(_times(blocks, chosen))
        best = best_slowest(calls, count)
        ends = [ends_of_blocks[end - 1] for end in chosen]
        ran = stage_times(make_stages(traced, ends), batch, rounds)
        found.append(
            Found(
                stages=count,
                begins=[blocks[first].name for first in chosen[:-1]],
                to_mean=slowest * count / whole,
                to_best=slowest / best,
                best_to_mean=best * count / whole,
                ran=max(ran) * count / sum(ran),
                choosing=choosing,
            )
        )
    return Measured(calls=len(calls), seconds=seconds, step=sum(ran), found=found)


def _times(blocks: Sequence[Block], ends: Sequence[int]) -> list[float]:
    return [
        sum(block.forward + block.backward for block in blocks[first:end])
        for first, end in zip([0, *ends], ends, strict=False)
    ]


def best_slowest(calls: Sequence[Block], stages: int) -> float:
    """The seconds of the slowest stage of the best of all cuts, found by trying all between any two calls."""
    times = torch.tensor([call.forward + call.backward for call in calls], dtype=torch.float64)
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), times.cumsum(0)])
    ends = torch.tensor([index + 1 for index, call in enumerate(calls[:-1]) if call.may_end])
    at = sums[ends]

    def rest(first: int, begun: float, left: int) -> float:
        """The slowest of the stages from the end of index `first` on, of which so many are left."""
        if left == 1:
            return float(sums[-1]) - begun
        if left == 2:  # all places for the last cut at once
            later = at[first:]
            return float(torch.maximum(later - begun, sums[-1] - later).min()) if len(later) else float("inf")
        best = float("inf")
        for index in range(first, len(at)):
            own = float(at[index]) - begun
            if own >= best:
                break
            best = min(best, max(own, rest(index + 1, float(at[index]), left - 1)))
        return best

    return rest(0, 0.0, stages)


def stage_times(stages: Sequence[StageProgram], batch: Tensor, rounds: int) -> list[float]:
    """The least seconds of a forward and a backward of each stage."""
    times: list[list[float]] = [[] for _ in stages]
    for turn in range(rounds + 1):
        values: Any = [(batch,)]
        for index, stage in enumerate(stages):
            given = map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), values)
            begin = time.perf_counter()
            values = stage.run(*given)
            forward = time.perf_counter() - begin
            made: list[Tensor] = []
            map_tensors(made.append, values)
            made = [tensor for tensor in made if tensor.requires_grad]
            ones = [torch.ones_like(tensor) for tensor in made]
            begin = time.perf_counter()
            torch.autograd.backward(made, ones)
            if turn:  # the first warms up
                times[index].append(forward + time.perf_counter() - begin)
    return [min(each) for each in times]
