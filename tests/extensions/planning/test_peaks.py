"""The peak of a recorded step, steps of other sizes, and the search for the largest."""

from collections.abc import Callable
from itertools import product

import pytest

from equipoise import ConfigurationError
from equipoise.extensions.common.device_loads import WHOLE_STEP, Addition, DeviceLoad
from equipoise.extensions.planning.peaks.device_peak import device_peak
from equipoise.extensions.planning.peaks.memory_prediction import MemoryPrediction
from equipoise.extensions.planning.peaks.recorded_step import Holder, PhaseStart, RecordedStep
from equipoise.extensions.planning.peaks.search import largest_size
from tests.support.pairs import pairwise


def step(size: int, *nbytes: int, repeated: int = 1) -> RecordedStep:
    """A step that creates 100 bytes of weights and activations, all of which it releases in the backward."""
    holders = [Holder("parameter", "", 100), *[Holder("activation", "", count) for count in nbytes] * repeated]
    events = [*range(1, len(holders) + 1), *(-number for number in range(2, len(holders) + 1))]
    starts = (("forward", 0), ("backward", len(holders)), ("optimizer step", len(events)))
    return RecordedStep(
        batch_size=size,
        holders=holders,
        events=events,
        phases=[PhaseStart(phase, event) for phase, event in starts],
    )


def test_loads_change_what_a_device_has() -> None:
    load = DeviceLoad(
        samples=lambda size: size // 2,
        factors={"parameter": {"forward": 0.5}},
        additions=(Addition(part="bucket", nbytes=1000, phases=("backward",)),),
    )
    peak = device_peak(step(10, 120), load, 1, 1)
    assert peak.phases == {"forward": 50 + 120, "backward": 1000 + 100 + 120, "optimizer step": 100}
    assert peak.parts == {"bucket": 1000, "activation": 120, "parameter": 100}
    assert device_peak(step(1, 12), WHOLE_STEP, 1, 512).nbytes == 1024


def test_memory_that_exists_for_a_moment_counts_in_the_peak() -> None:
    recorded = step(20, 240)
    nothing = DeviceLoad(factors={"activation": 0})
    assert device_peak(recorded, nothing, 1, 1).nbytes == 100
    for_a_moment = DeviceLoad(factors={"activation": 0}, momentary=("activation",))
    peak = device_peak(recorded, for_a_moment, 1, 1)
    assert peak.nbytes == 100 + 240
    assert peak.parts == {"activation": 240, "parameter": 100}


def test_parts_add_up_to_the_peak() -> None:
    """Also where the peak is the beginning of a phase, at which nothing exists for a moment."""
    for kept, phase in product((0, 0.5), ("forward", "backward")):
        load = DeviceLoad(
            factors={"activation": kept, "parameter": {"forward": kept}},
            additions=(Addition(part="bucket", nbytes=400, phases=(phase,)),),
            momentary=("activation", "parameter"),
        )
        peak = device_peak(step(1, 120, 44), load, 1, 1)
        assert sum(peak.parts.values()) == peak.nbytes


def test_sizes_between_measured_steps_lie_on_lines() -> None:
    steps = {size: step(size, 12 * size) for size in (2, 4, 8)}
    measured = MemoryPrediction(batch_size=4, steps=steps, method="measured")
    for size in (1, 2, 3, 8, 50):
        assert measured.peak(size).nbytes == 100 + 12 * size
    assert measured.largest_batch(100 + 12 * 50) == 50
    assert measured.facts.parameters == 100
    assert len(steps) == 3


def traced(make: Callable[[int], RecordedStep]) -> tuple[MemoryPrediction, list[int]]:
    """A prediction from a batch of 8, and the sizes of its further traces."""
    sizes: list[int] = []

    def trace(size: int) -> RecordedStep:
        sizes.append(size)
        return make(size)

    return MemoryPrediction(batch_size=8, steps={8: make(8)}, method="traced", trace=trace), sizes


def test_each_size_is_traced_once() -> None:
    prediction, sizes = traced(lambda size: step(size, size * (size - 1) // 2))
    halves = DeviceLoad(samples=lambda size: size // 2)
    for size in (24, 8, 24):
        assert prediction.peak(size).nbytes == 100 + size * (size - 1) // 2
        assert prediction.peak(2 * size, halves).nbytes == 100 + size * (size - 1) // 2
    # A device without samples has what one with a sample has.
    assert prediction.peak(1, halves).nbytes == 100
    assert sizes == [24, 1]
    assert prediction.largest_batch(100 + 1000 * 999 // 2) == 1000
    assert len(sizes) <= 20


def test_traces_of_a_loop_over_the_samples_have_a_bound() -> None:
    """Further sizes lie on the line through the largest two."""
    prediction, sizes = traced(lambda size: step(size, 3, repeated=1000 * size))
    assert prediction.peak(40).nbytes == 100 + 3000 * 40
    assert prediction.peak(10**6).nbytes == 100 + 3000 * 10**6
    assert prediction.largest_batch(100 + 3000 * 10**6) == 10**6
    assert max(sizes) == 40


@pytest.mark.parametrize(
    ("largest", "start", "expected"), pairwise([0, 1, 31, 32, 33, 2**24], [1, 32], [0, 0.5, 1, 10**9])
)
def test_the_search_finds_the_largest(largest: int, start: int, expected: float) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= largest

    assert largest_size(fits, lambda size: size <= expected * largest, start) == largest
    assert len(tried) == len(set(tried)) <= (3 if expected == 1 else 40)


def test_sizes_at_which_a_step_fails_do_not_fit() -> None:
    def fits(size: int) -> bool:
        if size > 64:
            raise ConfigurationError(f"a step with {size} samples fails")
        return True

    assert largest_size(fits, fits, 1) == 64
