"""Loads of sharded processes for a plan, from the bytes of a step on one device."""

from collections.abc import Sequence

from equipoise.extensions.planning.description.loads import Addition, DeviceLoad, PlannedLoads

__all__ = ["sharded_loads"]


def sharded_loads(count: int, shards: int, units: Sequence[int], root: int, gradients: int) -> PlannedLoads:
    """Return the loads of processes over which a module is sharded. Each takes a whole batch.

    Args:
        count: The number of processes.
        shards: Number of shards of each parameter.
        units: Bytes of the units' parameters, without the root.
        root: Bytes of the parameters in no unit.
        gradients: Bytes of the gradients of a unit or of the root, the largest of them.
    """
    largest = max(units, default=0)
    # One unit computes while the next is gathered.
    gathered = Addition(part="copy", nbytes=root + 2 * largest, phases=("forward", "backward"))
    # Its gradients are whole until they are summed.
    reduced = Addition(part="copy", nbytes=gradients, phases=("backward",))
    load = DeviceLoad(
        factors={
            "parameter": 1 / shards,
            "gradient": 1 / shards,
            "optimizer state": 1 / shards,
        },
        additions=(gathered, reduced),
    )
    note = "an estimate: units are gathered one ahead, and each process has an equal part of every parameter"
    return PlannedLoads(loads=[load] * count, batches=count, note=note)
