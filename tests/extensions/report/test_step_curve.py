"""Curves by steps: what stays of a long one."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.extensions.report import step_curve
from equipoise.extensions.report.step_curve import StepCurve

numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)


def filled(values: dict[int, float]) -> StepCurve:
    curve = StepCurve()
    for step, value in values.items():
        curve.add(step, value)
    return curve


@given(st.dictionaries(st.integers(0, 200), numbers, min_size=1), st.integers(1, 6))
def test_extremes_and_the_last_value_stay(unordered: dict[int, float], most_buckets: int):
    values = dict(sorted(unordered.items()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_curve, "_MOST_BUCKETS", most_buckets)
        kept = filled(values).points()
    assert list(kept) == sorted(kept)
    assert len(kept) <= 4 * most_buckets
    assert all(math.isnan(value) == math.isnan(values[step]) for step, value in kept.items())
    assert all(value == values[step] for step, value in kept.items() if not math.isnan(value))
    assert max(values) in kept
    finite = [value for value in values.values() if not math.isnan(value)]
    seen = [value for value in kept.values() if not math.isnan(value)]
    assert bool(finite) == bool(seen)
    if finite:
        assert (min(seen), max(seen)) == (min(finite), max(finite))
    assert len(seen) < len(kept) or len(finite) == len(values)


def test_every_bucket_of_a_long_curve_keeps_its_extremes():
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    values = {step: draw.gauss(0, 1) for step in range(draw.randrange(20_000, 40_000))}
    curve = filled(values)
    kept = curve.points()
    assert 256 < len(kept) <= 1024
    assert curve.width == 128 * 2 ** (len(values) > 2**15)
    for first in range(0, len(values), curve.width):
        bucket = [values[step] for step in range(first, min(first + curve.width, len(values)))]
        seen = [kept[step] for step in range(first, first + curve.width) if step in kept]
        assert (min(seen), max(seen), seen[-1]) == (min(bucket), max(bucket), bucket[-1])


def test_a_short_curve_stays_as_it_is():
    values = {step: float(step % 7) for step in range(256)}
    assert filled(values).points() == values


def test_a_million_steps_take_bounded_room():
    curve = StepCurve()
    for step in range(0, 10**6, 5):
        curve.add(step, float(step % 1000))
    assert len(curve.points()) <= 1024


def test_a_value_at_the_same_step_replaces_the_earlier():
    curve = filled({3: 1.0})
    curve.add(3, 2.0)
    assert curve.points() == {3: 2.0}


def test_what_lies_beyond_a_step_is_dropped():
    curve = filled({step: float(step) for step in range(10)})
    curve.drop_from(4)
    assert list(curve.points()) == [0, 1, 2, 3]


def test_the_state_is_whole():
    curve = filled({step: math.sin(step) for step in range(5000)})
    other = StepCurve()
    other.load_state_dict(curve.state_dict())
    for each in (curve, other):
        each.add(5000, 9.0)
    assert other.state_dict() == curve.state_dict()
