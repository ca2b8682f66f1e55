"""Commands and message tags between the processes of a pipeline."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.extensions.pipeline.schedule.schedule import Schedule
from equipoise.parallel.replicas.device_threads import ThreadState

__all__ = [
    "BACKWARD",
    "COMMAND",
    "FORWARD",
    "INPUT_GRADIENT",
    "REPLY",
    "StepOrder",
    "TensorSpec",
    "message_tag",
    "placeholder",
    "rank_of",
]

# Kinds of messages between two processes. Those between stages have tags for each stage, see `message_tag`.
COMMAND = 0
REPLY = 1
FORWARD = 2
BACKWARD = 3
INPUT_GRADIENT = 4
_KINDS = 5


def rank_of(stage: int, count: int) -> int:
    """Return the rank of the process that computes a stage.

    The main process, rank 0, computes the last of every `count` stages, rank 1 the one before it, and so on. Ranks of a
    machine follow each other, so values pass from machine to machine as seldom as possible.

    Args:
        stage: Number of the stage.
        count: Number of processes.

    Example:
        >>> [rank_of(stage, count=3) for stage in range(6)]
        [2, 1, 0, 2, 1, 0]
    """
    return count - 1 - stage % count


def message_tag(stage: int, kind: int) -> int:
    """Return the tag of messages to a stage.

    Every stage has its own tags, because a process with several stages may receive in another order than another
    process sends.

    Args:
        stage: Number of the stage that receives.
        kind: FORWARD or BACKWARD.
    """
    return kind + _KINDS * stage


class TensorSpec(NamedTuple):
    """Properties of a parameter or buffer, which a worker knows before it receives the values.

    Attributes:
        is_parameter: True for a parameter.
        shape: Its shape.
        dtype: Its dtype.
        on_host: True if it lies on the host beside a device. Default: False.
    """

    is_parameter: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool = False


class StepOrder(NamedTuple):
    """Command to compute a step in all stages.

    Attributes:
        programs: For each micro-batch the number of its calls.
        schedule: Order of the computations; None: forward only.
        state: State that torch keeps for a thread: modes of gradients, autocast.
        seed: Seed of the stage's random numbers.
        begins_window: True if the step begins an accumulation window. Default: False.
        input_gradients: True if the main process needs the gradients of the inputs. Default: False.
        stages_per_device: Number of stages in each process. Default: 1.
    """

    programs: tuple[int, ...]
    schedule: Schedule | None
    state: ThreadState
    seed: int
    begins_window: bool = False
    input_gradients: bool = False
    stages_per_device: int = 1


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of a shape without memory for its values.

    Computing with it gives NaN (0 for integers). Writing to it is an error of torch.

    Args:
        shape: Its shape.
        dtype: Its dtype.
    """
    value = 0.0
    if dtype.is_floating_point or dtype.is_complex:
        value = float("nan")
    return torch.full((), value, dtype=dtype).expand(tuple(shape))
