"""The page of a comparison: bars as long as their values, and text that stays text."""

from datetime import datetime

import pytest

from equipoise.extensions.comparison.page.bars import Bar, BarGroup, bar_chart
from equipoise.extensions.comparison.page.page import ComparedStrategy, ComparisonRecord, render_comparison
from tests.extensions.report.page.parsing import Element, parse


def lengths(figure: Element) -> list[float]:
    return [float(rect.attributes["width"].rstrip("%")) for rect in figure.all("rect")]


def test_bars_are_in_proportion() -> None:
    groups = [
        BarGroup("a", [Bar("first", 4096, "val"), Bar("second", 1024, "s0")]),
        BarGroup("none", []),
        BarGroup("b", [Bar("first", 0, "val")]),
    ]
    figure = parse(bar_chart("Peak", groups, "bytes", note="at most"))
    long, short, empty = lengths(figure)
    assert long == pytest.approx(4 * short)
    assert empty == 0
    texts = [text.text for text in figure.all("text")]
    assert texts == ["a", "b", "4 KiB", "1 KiB", "0 B"]
    # The names have a column of their own, in which the longest has room, however narrow the screen is.
    names = parse(bar_chart("Peak", [BarGroup("single_device", groups[0].bars)], "bytes")).one("svg", "names")
    (name,) = names.all("text")
    assert 7 * len("single_device") <= float(name.attributes["x"]) < float(names.attributes["width"])
    assert [entry.text for entry in figure.all("li")] == ["first", "second"]
    # No bar lies on another.
    tops = [float(rect.attributes["y"]) for rect in figure.all("rect")]
    heights = [float(rect.attributes["height"]) for rect in figure.all("rect")]
    for top, height, next_top in zip(tops, heights, tops[1:], strict=False):
        assert top + height <= next_top
    assert tops[-1] + heights[-1] <= float(figure.one("svg", "bars").attributes["height"])


def test_a_chart_without_bars() -> None:
    figure = parse(bar_chart("Rate", [], "number"))
    assert lengths(figure) == []


def test_the_page() -> None:
    hostile = "<script>alert(1)</script>"
    strategies = [
        ComparedStrategy(
            label="dp & co",
            cells={"strategy": "dp & co", "samples/s": "12"},
            rate=12.0,
            peaks={"cpu (0)": 10, "cpu (1)": 20},
            predicted={"cpu (1)": 21},
            is_recommended=True,
        ),
        ComparedStrategy(label="ddp", cells={"strategy": "ddp", "samples/s": "-"}, rate=None, peaks={}, reason=hostile),
    ]
    record = ComparisonRecord(
        title=hostile,
        written=datetime(2026, 1, 2, 3, 4),
        outcome="interrupted",
        facts={"devices": "cpu (0), cpu (1)"},
        strategies=strategies,
        recommendation="dp & co, on this machine.",
        overrides="strategy=dp",
        notes=["One note."],
        configuration="seed: 0\n",
    )
    page = parse(render_comparison(record))
    assert len(page.all("script")) == 1
    assert page.one("h1").text == f"{hostile} interrupted"
    cells = [cell.text for cell in page.all("td")]
    assert cells == ["dp & co recommended", "12", "ddp", "-"]
    assert f"ddp did not run: {hostile}" in page.text
    # Two measured bars, a predicted one, and a rate.
    assert len(page.all("g", "bar")) == 4
    assert "strategy=dp" in [code.text for code in page.all("code")]
    assert "One note." in page.text


def test_a_page_without_strategies() -> None:
    record = ComparisonRecord(title="Net", written=datetime(2026, 1, 1), outcome="finished", facts={}, strategies=[])
    assert "No strategy has run." in parse(render_comparison(record)).text
