"""The page of a plan: the record that its drawing takes, from the plan as JSON has it."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from equipoise.extensions.planning.command.rows import HEADS, lines_of, recommended, rows_of
from equipoise.extensions.planning.page.page import render_plan
from equipoise.extensions.planning.page.record import PlanRecord, StrategyCurve

__all__ = ["plan_page"]


def plan_page(plan: Mapping[str, Any]) -> str:
    """Return the HTML of a plan.

    Args:
        plan: The plan, as the process of the command has made it.
    """
    recommendation = plan["recommendation"]
    curves = []
    for name, peaks in plan["curves"].items():
        # JSON has texts for keys.
        by_size = {int(size): nbytes for size, nbytes in peaks.items()}
        is_recommended = name == recommendation["strategy"]
        curves.append(StrategyCurve(name=name, peaks=by_size, is_recommended=is_recommended))
    limits = {}
    for entry in plan["strategies"]:
        for device in entry["devices"]:
            limits[device["name"]] = device["usable"]
    record = PlanRecord(
        title=plan["title"],
        written=datetime.now(),
        batch_size=plan["batch_size"],
        limits=limits,
        curves=curves,
        facts={"samples of a batch": str(plan["batch_size"]), "step": plan["method"]},
        heads=HEADS,
        rows=rows_of(plan),
        recommendation=recommended(recommendation),
        overrides=" ".join(recommendation["overrides"]),
        notes=lines_of(plan),
    )
    return render_plan(record)
