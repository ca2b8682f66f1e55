"""The page of a plan."""

import re
from datetime import datetime
from typing import Any

from equipoise.extensions.planning.page.page import render_plan
from equipoise.extensions.planning.page.record import PlanRecord, StrategyCurve


def record(**values: Any) -> PlanRecord:
    given: dict[str, Any] = {
        "title": "Net <b>",
        "written": datetime(2026, 1, 1),
        "batch_size": 64,
        "limits": {"24 GiB": 24 * 2**30, "12 GiB": 12 * 2**30},
        "curves": [
            StrategyCurve(name="dp", peaks={1: 2**30, 64: 2**31, 128: 2**32}),
            StrategyCurve(name="ddp", peaks={1: 2**31, 64: 2**32, 128: 2**33}, is_recommended=True),
        ],
    }
    return PlanRecord(**given | values)


def test_a_line_for_each_strategy_and_limit() -> None:
    page = render_plan(record())
    labels = re.findall(r'data-label="([^"]*)"', page)
    assert labels == ["dp", "ddp (recommended)", "usable on 12 GiB", "usable on 24 GiB"]
    points = re.findall(r'data-x="([\d. ]+)" data-y="([\d.e+ ]+)"', page)
    assert ("1 64 128", f"{2**30:.5g} {2**31:.5g} {2**32:.5g}") in points
    assert "configured" in page
    assert "<b>" not in page.partition("</h1>")[0]


def test_what_is_recommended() -> None:
    heads = ("strategy", "device", "peak")
    page = render_plan(
        record(
            heads=heads,
            rows=[["ddp", "24 GiB", "4 GiB"]],
            recommendation="Take ddp: it fits.",
            overrides="strategy=ddp",
            notes=["pipeline: an estimate."],
            facts={"step": "traced"},
        )
    )
    for text in ("Take ddp: it fits.", "<code>strategy=ddp</code>", "pipeline: an estimate.", "traced", "4 GiB"):
        assert text in page


def test_nothing_is_predicted() -> None:
    page = render_plan(record(curves=[]))
    assert "No strategy is predicted." in page
    assert "data-label" not in page
