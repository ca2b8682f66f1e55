"""Loads of several devices for a plan, from the bytes of a step on one of them."""

from collections.abc import Callable, Sequence

from torch import nn

from equipoise.extensions.pipeline.schedule.schedule import Schedule, actions_of, releases_activations
from equipoise.extensions.planning.description.loads import (
    Addition,
    DeviceLoad,
    PlannedLoads,
    StageAction,
    StageWork,
    StepFacts,
)
from equipoise.memory.records import Category

__all__ = ["bytes_of_parameters", "process_loads", "replica_loads", "sharded_loads", "stage_loads"]

_GRADIENTS: tuple[Category, ...] = ("gradient",)

# Returns the samples of each device for a batch size.
Sizes = Callable[[int], Sequence[int]]


def bytes_of_parameters(module: nn.Module, *, trainable: bool = False) -> int:
    """Return the bytes of a module's parameters.

    Args:
        module: The module.
        trainable: Count those alone that require gradients. Default: False.
    """
    counted = 0
    for parameter in module.parameters():
        if parameter.requires_grad or not trainable:
            counted += parameter.nbytes
    return counted


def replica_loads(count: int, sizes: Sizes, facts: StepFacts, *, copies_gradients: bool) -> PlannedLoads:
    """Return the loads of replicas in one process, the first of which is the module itself.

    The replicas have neither gradients between two backwards nor a state of the optimiser. The first device receives
    their gradients, those of one replica at a time.

    Args:
        count: The number of devices.
        sizes: Returns the samples of each device.
        facts: The facts of the step.
        copies_gradients: Whether gradients are copied to the first device, as from another GPU.
    """

    def samples_of(index: int) -> Callable[[int], int]:
        return lambda batch_size: sizes(batch_size)[index]

    received = []
    if copies_gradients:
        received.append(Addition(part="copy", nbytes=facts.gradients, phases=("optimizer step",)))
    loads = [DeviceLoad(samples=samples_of(0), additions=received)]
    between_backwards = {"forward": 0, "optimizer step": 0}
    for index in range(1, count):
        load = DeviceLoad(
            samples=samples_of(index),
            factors={"optimizer state": 0, "gradient": between_backwards},
        )
        loads.append(load)
    return PlannedLoads(loads=loads)


def process_loads(count: int, trainable: int, *, are_views: bool, accumulates: bool, is_native: bool) -> PlannedLoads:
    """Return the loads of processes that exchange gradients in buckets. Each takes a whole batch.

    Args:
        count: The number of processes.
        trainable: Bytes of the parameters with gradients, which all buckets have together.
        are_views: Whether gradients are views of the buckets all the time.
        accumulates: Whether a window has several batches.
        is_native: Whether gradients become views of the buckets at the end of a window.
    """
    load = DeviceLoad(additions=(Addition(part="bucket", nbytes=trainable),))
    if are_views:
        # Each gradient is copied into its bucket.
        load = DeviceLoad(factors={"gradient": 0}, additions=load.additions, momentary=_GRADIENTS)
    elif is_native:
        # Within a window gradients remain from one batch to the next.
        factors = {"forward": float(accumulates), "optimizer step": 0}
        load = DeviceLoad(factors={"gradient": factors}, additions=load.additions)
    return PlannedLoads(loads=[load] * count, batches=count)


def sharded_loads(count: int, shards: int, units: Sequence[int], root: int) -> PlannedLoads:
    """Return the loads of processes over which a module is sharded. Each takes a whole batch.

    Args:
        count: The number of processes.
        shards: Number of shards of each parameter.
        units: Bytes of the units' parameters, without the root.
        root: Bytes of the parameters in no unit.
    """
    largest = max(units, default=0)
    # One unit computes while the next is gathered.
    gathered = Addition(part="copy", nbytes=root + 2 * largest, phases=("forward", "backward"))
    # Its gradients are whole until they are summed.
    gradients = Addition(part="copy", nbytes=max(largest, root), phases=("backward",))
    load = DeviceLoad(
        factors={
            "parameter": 1 / shards,
            "gradient": 1 / shards,
            "optimizer state": 1 / shards,
        },
        additions=(gathered, gradients),
    )
    note = "an estimate: units are gathered one ahead, and each process has an equal part of every parameter"
    return PlannedLoads(loads=[load] * count, batches=count, note=note)


def stage_loads(
    count: int,
    stages_per_device: int,
    micro_batches: int,
    schedule: Schedule,
    cut_before: Sequence[str] | None,
    *,
    copies_inputs: bool,
) -> PlannedLoads:
    """Return the loads of the devices of a pipeline.

    Args:
        count: The number of devices.
        stages_per_device: Number of stages on each device.
        micro_batches: Number of micro-batches of a batch.
        schedule: The schedule.
        cut_before: Names of the modules with which the stages but the first begin; None: they are not known yet.
        copies_inputs: Whether what passes between stages is copied, as to another GPU.
    """

    def actions_on(device: int) -> Callable[[int], Sequence[StageAction]]:
        return lambda micro_batches: _stage_actions(schedule, device, count, micro_batches, stages_per_device)

    loads = []
    for device in range(count):
        work = StageWork(
            stages=count * stages_per_device,
            micro_batches=micro_batches,
            actions=actions_on(device),
            cut_before=cut_before,
            copies_inputs=copies_inputs,
        )
        loads.append(DeviceLoad(work=work))
    note = ""
    if cut_before is None:
        note = "an estimate with stages of equal bytes; the cut is measured when the run begins, or named by cut_before"
    return PlannedLoads(loads=loads, note=note)


def _stage_actions(
    schedule: Schedule,
    device: int,
    count: int,
    micro_batches: int,
    stages_per_device: int,
) -> list[StageAction]:
    """Return the actions of a device that allocate or release activations."""
    actions = []
    for stage, action in actions_of(schedule, device, count, micro_batches, stages_per_device):
        releases = releases_activations(schedule, action)
        # The first half of a split backward keeps them.
        if releases or not action.backward:
            actions.append(StageAction(stage, action.micro_batch, releases))
    return actions
