"""Sizes as functions of the batch size, and the arithmetic of curves."""

import pytest

from equipoise.extensions.common.device_loads import Addition, DeviceLoad
from equipoise.extensions.planning.curve.fitting import (
    IrregularStepError,
    RecordedStep,
    fit_curve,
    needs_confirmation,
    reproduces,
)
from equipoise.extensions.planning.curve.parts import PhaseStart
from equipoise.extensions.planning.curve.prediction import MemoryPrediction
from equipoise.extensions.planning.curve.search import largest_size
from equipoise.memory.profile.ledger import LedgerEvent
from equipoise.memory.records import Category, TensorRecord

# Shapes as functions of the batch size, with the law that they follow.
SHAPES = {
    "samples": lambda size: (size, 3),
    "square": lambda size: (size, size),
    "flat samples": lambda size: (7 * size,),
    "half": lambda size: (size // 2, 5),
    "fixed": lambda size: (11,),
    "pairs": lambda size: (size * (size - 1) // 2,),
}


def record(shape: tuple[int, ...], category: Category = "activation") -> TensorRecord:
    nbytes = 4
    for length in shape:
        nbytes *= length
    return TensorRecord(module="", category=category, name="x", shape=shape, dtype="float32", nbytes=nbytes)


def step(size: int, *names: str) -> RecordedStep:
    """A step that creates tensors of these shapes, and then releases all but the first."""
    records = [record((25,), "parameter"), *(record(SHAPES[name](size)) for name in names)]
    events = [LedgerEvent(index, True, "forward") for index in range(len(records))]
    events += [LedgerEvent(index, False, "backward") for index in range(1, len(records))]
    starts = [PhaseStart("forward", 1), PhaseStart("backward", len(records)), PhaseStart("optimizer step", len(events))]
    return RecordedStep(batch_size=size, records=records, events=events, starts=starts)


@pytest.mark.parametrize("name", ["samples", "square", "flat samples", "half", "fixed"])
def test_laws(name: str) -> None:
    curve = fit_curve(step(8, name), step(16, name))
    assert not needs_confirmation(curve)
    for size in (1, 2, 5, 24, 101):
        assert curve.peak(size).nbytes == 100 + record(SHAPES[name](size)).nbytes
        assert reproduces(curve, step(size, name))


def test_another_law_is_noticed() -> None:
    curve = fit_curve(step(8, "pairs"), step(16, "pairs"))
    assert needs_confirmation(curve)
    assert not reproduces(curve, step(24, "pairs"))
    assert not reproduces(curve, step(24, "pairs", "fixed"))


def test_other_events_are_refused() -> None:
    with pytest.raises(IrregularStepError, match="8 samples and one with 16"):
        fit_curve(step(8, "samples"), step(16, "samples", "fixed"))


def test_phases_and_parts() -> None:
    curve = fit_curve(step(8, "samples", "fixed"), step(16, "samples", "fixed"))
    peak = curve.peak(10)
    assert peak.phases == {"forward": 100 + 120 + 44, "backward": 100 + 120 + 44, "optimizer step": 100}
    assert peak.phase == "forward"
    assert peak.parts == {"activation": 164, "parameter": 100}
    assert curve.totals == {"parameter": 100}


def test_loads_change_what_a_device_has() -> None:
    curve = fit_curve(step(8, "samples"), step(16, "samples"))
    load = DeviceLoad(
        samples=lambda size: size // 2,
        factors={"parameter": {"forward": 0.5}},
        additions=(Addition(part="bucket", nbytes=1000, phases=("backward",)),),
    )
    peak = curve.peak(20, load)
    assert peak.phases == {"forward": 50 + 120, "backward": 1000 + 100 + 120, "optimizer step": 100}
    assert peak.parts == {"bucket": 1000, "activation": 120, "parameter": 100}
    assert curve.peak(1, rounding=512).nbytes == 1024


def test_what_exists_for_a_moment() -> None:
    curve = fit_curve(step(8, "samples"), step(16, "samples"))
    nothing = DeviceLoad(factors={"activation": 0})
    assert curve.peak(20, nothing).nbytes == 100
    for_a_moment = DeviceLoad(factors={"activation": 0}, momentary=("activation",))
    peak = curve.peak(20, for_a_moment)
    assert peak.nbytes == 100 + 240
    assert peak.parts == {"activation": 240, "parameter": 100}


def test_lines_between_sizes() -> None:
    steps = [step(size, "samples") for size in (2, 4, 8)]
    curves = [fit_curve(recorded, recorded) for recorded in steps]
    sampled = MemoryPrediction(batch_size=4, curves=curves, method="measured")
    for size in (1, 2, 3, 8, 50):
        assert sampled.peak(size).nbytes == 100 + 12 * size
    assert sampled.largest_batch(100 + 12 * 50) == 50
    assert sampled.facts.parameters == 100


@pytest.mark.parametrize("largest", [0, 1, 2, 31, 32, 33, 1000])
@pytest.mark.parametrize("start", [1, 32])
def test_the_search_finds_the_largest(largest: int, start: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= largest

    assert largest_size(fits, start) == largest
    assert len(tried) < 50
