"""The cut is the one that was chosen first, and counts what links take."""

from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore

from equipoise.extensions.pipeline.cut_choice import CommonCut, CutChoice
from equipoise.extensions.pipeline.graph.traced import Traced
from equipoise.extensions.pipeline.planning.cut import CutOptions, PinnedCut
from tests.support.traces import traced

CPU = torch.device("cpu")


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


def choice_for(network: nn.Module, **options: Any) -> CutChoice:
    plan = CutOptions(devices=[CPU, CPU], schedule="1f1b", micro_batches=2, links=options.pop("links", ()))
    arguments = {"names": None, "pinned": None, "common_cut": None, **options}
    return CutChoice(network, plan, **arguments)


def called(network: nn.Module) -> tuple[Traced, list[torch.Tensor]]:
    x = torch.randn(4, 256)
    return traced(network, x), [x]


def test_all_replicas_take_the_first_cut() -> None:
    network = linears()
    recorded, tensors = called(network)
    common_cut = CommonCut(HashStore())
    assert common_cut.read() is None
    names = [node.name for node in recorded.calls]
    first = PinnedCut(names=["1"], calls=[names[-1]])
    assert common_cut.publish(first) == first
    assert common_cut.read() == first
    chosen = choice_for(network, common_cut=common_cut).measured(recorded, "", tensors)
    assert chosen.pinned.calls == first.calls


def test_links_are_timed_for_a_measured_cut_alone() -> None:
    network = linears()
    recorded, tensors = called(network)
    calls: list[int] = []

    def time_links() -> list[float]:
        calls.append(0)
        return [1.0, 1.0]

    slow = choice_for(network, time_links=time_links).measured(recorded, "", tensors)
    assert calls == [0]
    # A float of 4 samples with 256 features, there and back, in stages on both sides.
    seconds = 2 * 4 * 256 * 4
    assert all(stage.forward + stage.backward > seconds for stage in slow.stages)
    given = choice_for(network, links=[2.0, 2.0], time_links=time_links).measured(recorded, "", tensors)
    assert all(stage.forward + stage.backward > 2 * seconds for stage in given.stages)
    assert calls == [0]
