"""Sharded weights that come and go in a step, by arithmetic on a step of two layers."""

from equipoise.extensions.common.device_loads import DeviceLoad, GatheredUnit
from equipoise.extensions.planning.peaks.device_peak import device_peak
from equipoise.extensions.planning.peaks.recorded_step import Holder, PhaseStart, RecordedStep

WEIGHT = 1000
# A root without parameters, and two units.
UNITS = [GatheredUnit("first", WEIGHT, WEIGHT), GatheredUnit("second", WEIGHT, WEIGHT), GatheredUnit("", 0, 0)]
HOLDERS = [
    Holder("parameter", "first", WEIGHT),
    Holder("parameter", "second", WEIGHT),
    Holder("activation", "first", 1),
    Holder("activation", "second", 1),
    Holder("gradient", "second", WEIGHT),
    Holder("temporary", "second", 1),
    Holder("gradient", "first", WEIGHT),
    Holder("temporary", "", 1),
]
# Parameters; a forward of both layers; their backwards, the last first; a step of the optimiser.
EVENTS = [1, 2, 3, 4, 5, 6, -4, 7, -6, -3, 8, -8]
STEP = RecordedStep(
    batch_size=1,
    holders=HOLDERS,
    events=EVENTS,
    phases=[PhaseStart("forward", 0), PhaseStart("backward", 4), PhaseStart("optimizer step", 10)],
)

HALF = {"parameter": 0.5, "gradient": 0.5, "optimizer state": 0.5, "temporary": {"optimizer step": 0.5}}


def test_the_peak_of_two_units_that_are_gathered_in_turn() -> None:
    peak = device_peak(STEP, DeviceLoad(factors=HALF, units=UNITS), 1, 1)
    shards = WEIGHT
    # Forward: the first unit's buffer lives until the second has its own and its weights. The first's output does, too.
    assert peak.phases["forward"] == shards + 3 * WEIGHT + 1
    # Backward: the first unit is in its buffer when the second computes, whose whole gradient comes first. In the
    # backward of the first unit there are its weights, its gradient, the input of the sum, and half a gradient.
    assert peak.phases["backward"] == shards + WEIGHT + WEIGHT + WEIGHT + WEIGHT // 2 + 2
    # Gradients are shards in the end, and all else is freed.
    assert peak.phases["optimizer step"] == round(shards + WEIGHT + 0.5)
    assert peak.nbytes == max(peak.phases.values())
    assert peak.parts["copy"] >= 2 * WEIGHT


def test_a_frozen_unit_that_has_no_backward_is_freed_after_that_of_others() -> None:
    step = RecordedStep(
        batch_size=1,
        holders=HOLDERS,
        events=[1, 2, 3, 4, 5, 6, -4, -6, -3, 8, -8],
        phases=[PhaseStart("forward", 0), PhaseStart("backward", 4), PhaseStart("optimizer step", 9)],
    )
    peak = device_peak(step, DeviceLoad(factors=HALF, units=UNITS), 1, 1)
    # Shards of both units, and of the gradient of one.
    assert peak.phases["optimizer step"] == round(WEIGHT + WEIGHT / 2 + 0.5)
