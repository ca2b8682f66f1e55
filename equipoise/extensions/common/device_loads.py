"""The interface through which a strategy says what each of its devices holds."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from torch import nn

from equipoise.memory.records import Category

__all__ = [
    "WHOLE_STEP",
    "Addition",
    "DeviceLoad",
    "GatheredUnit",
    "Part",
    "PlannedLoads",
    "PlannedPart",
    "StageAction",
    "StageWork",
    "StepFacts",
]

# Parts of memory: the categories of tensors, and what only several devices have.
Part = Category | Literal["bucket", "copy"]

# The share of a category that a device holds; by phase where it differs.
Share = float | Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Facts of a step on one device, from which a strategy computes the loads of several.

    Attributes:
        parameters: Bytes of all parameters.
        gradients: Bytes of the gradients of a step; parameters without one do not count.
        optimizer_state: Bytes of the state of the optimisers.
        buffers: Bytes of the module's buffers.
        accumulates: Whether a window has several batches. Default: False.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    buffers: int
    accumulates: bool = False


@dataclass(frozen=True, kw_only=True)
class Addition:
    """Memory that a device holds beside the step.

    Attributes:
        part: Its kind.
        nbytes: Its bytes.
        phases: The phases in which it exists. Default: all.
    """

    part: Part
    nbytes: int
    phases: Collection[str] = ()

    def is_in(self, phase: str) -> bool:
        """Return True if it exists in a phase."""
        return not self.phases or phase in self.phases


class GatheredUnit(NamedTuple):
    """Sharded weights that are whole while their module computes.

    Attributes:
        name: Name of the module; empty for the root, which has all parameters in no unit.
        nbytes: Bytes of its parameters, whole.
        gradients: Bytes of its gradients, whole.
    """

    name: str
    nbytes: int
    gradients: int


class StageAction(NamedTuple):
    """Forward or backward of one stage with one micro-batch.

    Attributes:
        stage: Index of the stage.
        micro_batch: Index of the micro-batch.
        is_backward: True for a backward that releases activations.
    """

    stage: int
    micro_batch: int
    is_backward: bool


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Stages of a pipeline that a device computes.

    Attributes:
        stages: Number of all stages.
        micro_batches: Number of micro-batches; fewer if a batch has fewer samples.
        actions: Returns the actions of the device for a number of micro-batches, in order.
        cut_before: Names of the modules with which the stages but the first begin. Default: stages of equal bytes.
        copies_inputs: True if what passes to the device is copied, as to another GPU. Default: False.

    Example:
        >>> work = StageWork(stages=2, micro_batches=4, actions=lambda micro_batches: [])
        >>> work.num_micro_batches(3), work.samples(10)
        (3, 3)
    """

    stages: int
    micro_batches: int
    actions: Callable[[int], Sequence[StageAction]]
    cut_before: Sequence[str] | None = None
    copies_inputs: bool = False

    def num_micro_batches(self, batch_size: int) -> int:
        """Return the number of micro-batches of a batch."""
        return min(self.micro_batches, batch_size)

    def samples(self, batch_size: int) -> int:
        """Return the samples of the largest micro-batch."""
        # Rounded up.
        return -(-batch_size // self.num_micro_batches(batch_size))


def _all_samples(batch_size: int) -> int:
    return batch_size


# Equal to itself alone, so that peaks can be found by it.
@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceLoad:
    """The part of a step that one device has.

    Attributes:
        samples: Returns its samples of a batch of that size. Default: all.
        factors: For each category the share of it that the device holds, such as 0 for an optimiser's state that is
            elsewhere; by phase where it differs. Default: 1.
        additions: Memory that it holds beside the step.
        momentary: Categories whose storages exist for a moment when they are created, even if it holds none of them:
            gradients that go into a bucket immediately. Default: none.
        units: Units of weights in shards, the root last; they are gathered one after the other. Default: none.
        work: The stages of a pipeline that it computes, in place of factors and additions. Default: none.

    Example:
        >>> half = DeviceLoad(samples=lambda batch_size: -(-batch_size // 2), factors={"gradient": {"forward": 0}})
        >>> half.samples(5), half.factor("gradient", "forward"), half.factor("gradient", "backward")
        (3, 0, 1)
    """

    samples: Callable[[int], int] = _all_samples
    factors: Mapping[Category, Share] = field(default_factory=dict)
    additions: Sequence[Addition] = ()
    momentary: Collection[Category] = ()
    units: Sequence[GatheredUnit] = ()
    work: StageWork | None = None

    def factor(self, category: Category, phase: str) -> float:
        """Return the share of a category that the device holds in a phase."""
        share = self.factors.get(category, 1)
        if isinstance(share, Mapping):
            return share.get(phase, 1)
        return share

    def added(self, phase: str) -> int:
        """Return the bytes beside the step in a phase."""
        return sum(addition.nbytes for addition in self.additions if addition.is_in(phase))


# One device that has all of a step.
WHOLE_STEP = DeviceLoad()


# A step computes other things with a part of a sample, so no share of a whole step would describe it.
class PlannedPart(Protocol):
    """The part of each sample that a device computes, such as some positions of a sequence."""

    def of_batch(self, batch: Any) -> Any:
        """Return the part of a batch that the device has."""
        ...

    def mode(self) -> AbstractContextManager[Any]:
        """Return the context in which a step computes the part, and its backward."""
        ...


@dataclass(frozen=True, kw_only=True)
class PlannedLoads:
    """Loads of the devices of a strategy.

    Attributes:
        loads: The load of each device, in order.
        batches: Batches of the loader that a step takes, such as one for each process. Default: 1.
        note: Basis of the figures, if they are rougher than others. Default: nothing.
        part: Makes, from the module, the part of each sample that a device computes. The step is traced anew for it, in
            a process to which this is sent. Default: None, whole samples.
    """

    loads: Sequence[DeviceLoad]
    batches: int = 1
    note: str = ""
    part: Callable[[nn.Module], PlannedPart] | None = None
