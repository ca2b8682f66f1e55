"""Commands and message tags between the processes of a pipeline."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.parallel.replicas.device_threads import ThreadState
from equipoise.pipeline.schedule.schedule import Schedule

__all__ = [
    "BACKWARD",
    "COMMAND",
    "FORWARD",
    "HOME",
    "REPLY",
    "Kind",
    "StepOrder",
    "nothing_like",
    "rank_of",
    "way_to",
]

COMMAND, REPLY, FORWARD, BACKWARD, HOME = range(5)  # the ways between two processes; between stages see `way_to`


def rank_of(stage: int, count: int) -> int:
    """Which of so many processes computes a stage: the first one the last, the others those before, in order."""
    return (stage + 1) % count


def way_to(stage: int, kind: int) -> int:
    """The tag of what is sent to a stage, forward or backward.

    Each stage has its own, since a process with several need not receive in the order in which another sends.
    """
    return kind + (HOME + 1) * stage


class Kind(NamedTuple):
    """What a tensor is before it has come."""

    is_parameter: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


class StepOrder(NamedTuple):
    """A step that all stages compute.

    Attributes:
        programs: For each micro-batch the number of its calls.
        schedule: In which order; None: there is no backward.
        state: What torch keeps for a thread: modes of gradients, autocast.
        seed: For the stage's random numbers.
        fresh: Whether gradients of earlier steps are done with.
        home: Whether the first process wants the gradients of the inputs.
        stages_per_device: How many stages each process has.
    """

    programs: tuple[int, ...]
    schedule: Schedule | None
    state: ThreadState
    seed: int
    fresh: bool = False
    home: bool = False
    stages_per_device: int = 1


def nothing_like(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor without values or memory: whoever computes with it sees NaN, and writing to it is an error."""
    nothing = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), nothing, dtype=dtype).expand(tuple(shape))
