"""Loads of the stages of a pipeline for a plan."""

from collections.abc import Callable, Sequence

from equipoise.extensions.common.device_loads import DeviceLoad, PlannedLoads, StageAction, StageWork
from equipoise.extensions.pipeline.schedule.schedule import Schedule, actions_of, effect_of

__all__ = ["stage_loads"]


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
        change = effect_of(schedule, action).active
        if change:
            actions.append(StageAction(stage, action.micro_batch, change < 0))
    return actions
