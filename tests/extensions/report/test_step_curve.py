"""Curves by steps: what stays of a long one."""

import math

from hypothesis import given
from hypothesis import strategies as st

from equipoise.extensions.report.curve_history import StepCurve

numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)


def filled(values: dict[int, float]) -> StepCurve:
    curve = StepCurve()
    for step, value in values.items():
        curve.add(step, value)
    return curve


@given(st.dictionaries(st.integers(0, 20_000), numbers, min_size=1, max_size=20), st.integers(500, 3000))
def test_a_long_curve_keeps_its_extremes_and_ends(outliers: dict[int, float], length: int):
    values = dict(sorted({**{7 * step: float(step % 5) for step in range(length)}, **outliers}.items()))
    kept = filled(values).points()
    assert len(kept) <= 1024
    assert list(kept) == sorted(kept)
    assert {min(values), max(values)} <= kept.keys()
    finite = [value for value in values.values() if math.isfinite(value)]
    seen = [value for value in kept.values() if math.isfinite(value)]
    assert (min(seen), max(seen)) == (min(finite), max(finite))
    assert (len(seen) < len(kept)) == (len(finite) < len(values))
    if len(values) <= 1024:
        assert len(kept) == len(values)


def test_a_value_at_the_same_step_replaces_the_earlier():
    curve = filled({3: 1.0})
    curve.add(3, 2.0)
    assert curve.points() == {3: 2.0}


def test_the_state_is_whole():
    curve = filled({step: math.sin(step) for step in range(5000)})
    other = StepCurve(curve.state_dict())
    for each in (curve, other):
        each.add(5000, 9.0)
    assert other.state_dict() == curve.state_dict()
