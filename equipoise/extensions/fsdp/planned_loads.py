"""Loads of sharded processes for a plan, from the bytes of a step on one device."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from equipoise.extensions.common.device_loads import DeviceLoad, GatheredUnit, PlannedLoads
from equipoise.extensions.fsdp.mesh.context.steps.planned_sequences import PlannedSequences
from equipoise.extensions.fsdp.units import Unit, unit_of

__all__ = ["sharded_loads"]


def sharded_loads(
    count: int, shards: int, units: Sequence[Unit], *, has_default_freeing: bool, context: int = 1
) -> PlannedLoads:
    """Return the loads of processes over which a module is sharded. Each takes a whole batch.

    Args:
        count: The number of processes.
        shards: Number of shards of each parameter.
        units: The units, the root last.
        has_default_freeing: Whether all units but the root are freed after their forwards, as torch decides by itself.
        context: Number of processes over which sequences are divided. Default: 1.
    """
    # 1. The bytes of each unit. One inside another counts as a part of it: both are whole at a time.
    outer = [unit for unit in units if not any(unit.name.startswith(f"{other.name}.") for other in units)]
    nbytes: dict[str, int] = defaultdict(int)
    gradients: dict[str, int] = defaultdict(int)
    for name, parameter in units[-1].module.named_parameters():
        title = unit_of(name, outer).name
        nbytes[title] += parameter.nbytes
        if parameter.requires_grad:
            gradients[title] += parameter.nbytes

    # 2. The load, the same for all. An optimiser steps shards, and needs as much less for a moment.
    load = DeviceLoad(
        factors={
            "parameter": 1 / shards,
            "gradient": 1 / shards,
            "optimizer state": 1 / shards,
            "temporary": {"optimizer step": 1 / shards},
        },
        units=[GatheredUnit(unit.name, nbytes[unit.name], gradients[unit.name]) for unit in outer],
    )
    note = "an estimate: each process has an equal part of every parameter"
    if not has_default_freeing:
        # The loads have no other way.
        note += ", and units are freed after their forwards, as they are without reshard_after_forward"
    part = None
    if context > 1:
        note += ", and the first batch is not compared with whole sequences (compare_layers=False)"
        part = partial(PlannedSequences, context)
    return PlannedLoads(loads=[load] * count, batches=count // context, note=note, part=part)
