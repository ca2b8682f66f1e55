"""The page of a comparison: bars as long as their values, and text that stays text."""

from itertools import pairwise

import pytest

from equipoise.extensions.comparison.results.bars import Bar, bar_chart
from equipoise.extensions.comparison.results.comparison import Comparison, Row
from equipoise.extensions.comparison.results.page import comparison_page
from tests.extensions.common.page.parsing import Element, parse


def lengths(figure: Element) -> list[float]:
    return [float(rect.attributes["width"].rstrip("%")) for rect in figure.all("rect")]


def test_bars_are_in_proportion() -> None:
    groups = {
        "a": [Bar("first", 4096, "val"), Bar("second", 1024, "s0")],
        "none": [],
        "b": [Bar("first", 0, "val")],
    }
    figure = parse(bar_chart("Peak", groups, "bytes"))
    long, short, empty = lengths(figure)
    assert long == pytest.approx(4 * short)
    assert empty == 0
    texts = [text.text for text in figure.all("text")]
    assert texts == ["a", "b", "4.0 KiB", "1.0 KiB", "0 B"]
    # The names have a column of their own, in which the longest has room, however narrow the screen is.
    names = parse(bar_chart("Peak", {"single_device": groups["a"]}, "bytes")).one("svg", "labels")
    (name,) = names.all("text")
    assert 6 * len("single_device") <= float(name.attributes["x"]) < float(names.attributes["width"])
    assert [entry.text for entry in figure.all("li")] == ["first", "second"]
    # No bar lies on another.
    places = [(float(rect.attributes["y"]), float(rect.attributes["height"])) for rect in figure.all("rect")]
    bottom = float(figure.one("svg", "bars").attributes["height"])
    for (top, height), (next_top, _) in pairwise([*places, (bottom, 0)]):
        assert top + height <= next_top


def test_the_page_has_a_row_for_each_strategy_and_text_stays_text() -> None:
    hostile = "<script>alert(1)</script>"
    dp = Row("dp & co", ["strategy=dp"], predicted={"cpu (1)": 21})
    dp.note({"peaks": {"cpu (0)": 10, "cpu (1)": 20}, "seconds": 1.0, "samples_per_second": 12.0})
    ddp = Row("ddp", ["strategy=ddp"], reason=hostile)
    comparison = Comparison(hostile, ["cpu (0)", "cpu (1)"], 8, 5, ["One note."], [dp, ddp], "interrupted")
    recommendation = {"strategy": "dp & co", "reason": "It is fast.", "overrides": ["strategy=dp"]}
    page = parse(comparison_page(comparison, recommendation, {"seed": 0}))
    assert len(page.all("script")) == 1
    assert page.one("h1").text == f"{hostile} interrupted"
    cells = [cell.text for cell in page.all("td")]
    # A value in each cell.
    heads = [head.text for head in page.all("th")]
    assert heads[:4] == ["strategy", "samples/s", "peak, device 0", "peak, device 1"]
    assert cells[:4] == ["dp & co recommended", "12", "10 B", "20 B"]
    assert cells[len(heads) : len(heads) + 2] == ["ddp", "not run"]
    assert f"ddp did not run: {hostile}" in page.text
    # Two measured bars, one with its prediction, and a rate. Devices alone are in the legend.
    assert len(page.all("g", "bar")) == 3
    assert len(page.all("line", "expected")) == 1
    assert "device 1: 20 B, predicted 21 B" in [title.text for title in page.all("title")]
    assert [entry.text for entry in page.all("li")] == ["device 0", "device 1"]
    assert "strategy=dp" in [code.text for code in page.all("code")]
    for text in ("dp & co, on this machine. It is fast.", "One note.", "1 of 2"):
        assert text in page.text


@pytest.mark.parametrize(("devices", "heads"), [(1, ["peak"]), (5, ["highest peak"])])
def test_peaks_of_one_device_and_of_many_have_a_column(devices: int, heads: list[str]) -> None:
    peaks = {f"cpu ({number})": 1 + number for number in range(devices)}
    row = Row("dp", ["strategy=dp"])
    row.note({"peaks": peaks, "seconds": 1.0, "samples_per_second": 8.0})
    page = parse(comparison_page(Comparison("Net", [*peaks], 8, 5, rows=[row, Row("ddp", reason="no")]), None, {}))
    assert [head.text for head in page.all("th") if "peak" in head.text] == heads
    assert [cell.text for cell in page.all("td")][2] == f"{devices} B"


def test_the_page_says_that_nothing_has_run() -> None:
    row = Row("dp", reason="one device")
    page = comparison_page(Comparison("Net", ["cpu"], None, 5, rows=[row]), None, {})
    assert "No strategy has run." in parse(page).text
