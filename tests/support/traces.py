"""Forwards that are recorded, and run in stages."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.graph.call_structure import CallStructure, NetworkCall
from equipoise.extensions.pipeline.graph.stages import StageProgram, make_stages
from equipoise.extensions.pipeline.graph.traced import Traced
from equipoise.extensions.pipeline.recording.tracing import trace

__all__ = ["run", "run_stages", "traced"]


def traced(network: nn.Module, *args: Any, **kwargs: Any) -> Traced:
    """The recorded calls of a network's forward on the CPU."""
    structure = CallStructure(args, kwargs)
    return trace(NetworkCall(network, network.forward, structure, network, torch.device("cpu")))


def run_stages(stages: Sequence[StageProgram], tensors: Sequence[Tensor]) -> Any:
    """The output of stages, one after the other, for the tensors of a call."""
    values: Any = [tuple(tensors)]
    for stage in stages:
        values = stage.run(*values)
    return values


def run(made: Traced, *tensors: Tensor) -> Any:
    """The output of recorded calls, in one stage."""
    return run_stages(make_stages(made, [len(made.calls)]), tensors)
