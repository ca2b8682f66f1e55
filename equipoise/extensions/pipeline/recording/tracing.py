"""Trace the forward of a network into a list of calls, by recording it while it runs.

Some submodules cannot be followed: their code asks for values that the network computes, or it changes attributes. Such
a submodule stays whole: its own call is one entry of the list. What remains are obstacles in the network's own forward,
which become errors.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from equipoise.extensions.pipeline.forward.forward_effects import SETS_ATTRIBUTE
from equipoise.extensions.pipeline.graph.call_structure import CallStructure
from equipoise.extensions.pipeline.graph.traced import Traced
from equipoise.extensions.pipeline.recording.forward_recording import (
    ForwardRecording,
    NotTraceable,
    set_value,
    values_of,
)

__all__ = ["NotTraceable", "trace"]


def trace(
    network: nn.Module,
    forward: Callable[..., Any],
    structure: CallStructure,
    opaque_types: Mapping[type[nn.Module], str] | None = None,
    *,
    module: nn.Module | None = None,
    device: torch.device | None = None,
) -> Traced:
    """Trace a forward. It runs once, or several times if it sets attributes, and its state is restored.

    Args:
        network: The network, in the mode (training or evaluation) in which it will run.
        forward: Its own forward.
        structure: Arguments of the call, with their tensors.
        opaque_types: Classes of submodules that stay whole, each with the reason, beside those that cannot be traced.
            Default: none.
        module: Module whose state is restored. Default: the network.
        device: Device of the computation. Layers on other devices are lent to it while they are called. Default: the
            device of the first tensor.

    Raises:
        NotTraceable: If the network's own code cannot be traced.
    """
    if device is None:
        device = torch.device("cpu")
        if structure.tensors:
            device = structure.tensors[0].device
    recording = ForwardRecording(
        network,
        forward,
        structure,
        opaque_types or {},
        module or network,
        device,
    )

    # 1. Most forwards are recorded at their first call.
    traced, obstacle = _recorded(recording)
    reasons = [obstacle]
    if traced is not None:
        reasons = list(traced.opaque.values())
    if not any(SETS_ATTRIBUTE in reason for reason in reasons):
        return _traced(traced, obstacle)

    # 2. Some libraries set attributes at the first call alone. That call is made now, and the second one is recorded.
    originals = values_of(recording.attribute_changes)
    recording.make_first_call()
    second_traced, second_obstacle = _recorded(recording)

    # 3. Attributes that every call sets keep the values that they had.
    changed_again = set(recording.attribute_changes)
    for attribute, value in originals.items():
        if attribute in changed_again:
            set_value(attribute, value)
    return _traced(second_traced or traced, second_obstacle)


def _recorded(recording: ForwardRecording) -> tuple[Traced | None, str]:
    """Return the calls of a forward, or None and the obstacle that has prevented their recording."""
    # The error itself would keep the tensors of the recording alive.
    try:
        return recording.record(), ""
    except NotTraceable as error:
        return None, error.obstacle


def _traced(traced: Traced | None, obstacle: str) -> Traced:
    """Return the calls of a forward.

    Raises:
        NotTraceable: If there are no calls.
    """
    if traced is None:
        raise NotTraceable(obstacle)
    return traced
