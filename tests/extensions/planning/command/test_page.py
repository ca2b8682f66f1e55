"""The page of a plan."""

import re
from typing import Any

from equipoise.extensions.planning.command.page import plan_page

GIB = 2**30


def device(name: str, gibibytes: int) -> dict[str, Any]:
    """Return a device whose peak is 4 GiB."""
    peak = {"nbytes": 4 * GIB, "phase": "forward", "parts": {"parameter": 4 * GIB}}
    usable = gibibytes * GIB
    return {"name": name, "usable": usable, "occupied": 0, "samples": 32, "peak": peak, "fits": usable >= 4 * GIB}


def entry(strategy: str, **values: Any) -> dict[str, Any]:
    usual = {"strategy": strategy, "fits": True, "largest_batch": 100, "batches": 1, "note": "", "reason": None}
    return usual | {"devices": [device("24 GiB", 24), device("12 GiB", 12)]} | values


PLAN: dict[str, Any] = {
    "title": "Net <b>",
    "batch_size": 64,
    "budget": None,
    "method": "traced",
    "notes": [],
    "strategies": [
        entry("dp"),
        entry("ddp"),
        entry("pipeline", devices=[], reason="too few parts"),
    ],
    "curves": {
        "dp": {1: GIB, 64: 2 * GIB, 128: 4 * GIB},
        "ddp": {1: 2 * GIB, 64: 4 * GIB, 128: 8 * GIB},
    },
    "recommendation": {"strategy": "ddp", "reason": "it fits", "overrides": ["strategy=ddp"]},
}


def test_a_line_for_each_strategy_and_limit() -> None:
    page = plan_page(PLAN)
    labels = re.findall(r'data-label="([^"]*)"', page)
    assert labels == ["dp", "ddp (recommended)", "usable on 12 GiB", "usable on 24 GiB"]
    points = re.findall(r'data-x="([\d. ]+)" data-y="([\d.e+ ]+)"', page)
    assert ("1 64 128", f"{2**30:.5g} {2**31:.5g} {2**32:.5g}") in points
    assert "configured" in page
    assert "No strategy is predicted" not in page
    assert "<b>" not in page.partition("</h1>")[0]
    recommended = ("Take ddp: it fits.", '<code class="copied">strategy=ddp</code>')
    for text in (*recommended, "pipeline: not predicted: too few parts.", "traced", "4.0 GiB"):
        assert text in page
