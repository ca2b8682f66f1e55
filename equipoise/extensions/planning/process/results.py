"""Curves of steps as plain values, which processes exchange as JSON."""

from collections.abc import Mapping
from typing import Any

from equipoise.extensions.planning.curve.curve import MemoryCurve
from equipoise.extensions.planning.curve.sampled import SampledCurve
from equipoise.extensions.planning.tracing.tracer import StepCurve

__all__ = ["curve_of_plain", "plain_curve"]


def plain_curve(step_curve: StepCurve) -> dict[str, Any]:
    """Return the curve of a step as values that JSON can hold.

    Args:
        step_curve: The curve.
    """
    return {
        "method": step_curve.method,
        "notes": step_curve.notes,
        "curve": step_curve.curve.to_plain(),
    }


def curve_of_plain(values: Mapping[str, Any]) -> StepCurve:
    """Return the curve of plain values.

    Args:
        values: The result of `plain_curve`.
    """
    # A curve through single points has these; any other is a step whose sizes grow.
    curve: MemoryCurve | SampledCurve
    if "points" in values["curve"]:
        curve = SampledCurve.from_plain(values["curve"])
    else:
        curve = MemoryCurve.from_plain(values["curve"])
    return StepCurve(curve=curve, method=values["method"], notes=values["notes"])
