"""Lines, axes and numbers of a page's figures."""

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from equipoise.extensions.common.page.charts import Boundary, Line, line_chart
from equipoise.extensions.common.page.markup import section
from equipoise.extensions.common.page.page import html_page, page_header
from equipoise.extensions.common.page.scales import make_scale, thin
from tests.extensions.common.page.browser import after_script, needs_browser
from tests.extensions.common.page.parsing import Element, parse


def figure(*points: tuple[float, float], **given: object) -> Element:
    lines = [Line(label="a", style="val", points=points)]
    return parse(line_chart("title", lines, **{"x": "number", "y": "number", **given}))


class TestThin:
    def test_all_parts_of_a_logarithmic_axis_keep_points(self):
        points = [(10.0 ** (-8 + 8 * step / 2000), float(step % 7)) for step in range(2000)]
        kept = thin(points, 200, math.log10)
        assert sum(x < 1e-4 for x, _ in kept) >= len(kept) // 3

    def test_points_for_which_there_is_room_all_stay(self):
        points = [(float(step), float(step % 3)) for step in range(200)]
        assert thin(points, 200) == points


class TestScale:
    @pytest.mark.parametrize("unit", ["number", "bytes", "seconds", "step"])
    def test_every_value_has_its_place_and_marks_are_few(self, unit: str):
        seed = random.randrange(2**32)
        print("seed", seed)
        draw = random.Random(seed)
        for _ in range(500):
            values = [draw.choice((1, -1)) * 10 ** draw.uniform(-12, 12) for _ in range(draw.randrange(1, 5))]
            from_zero, log = draw.random() < 0.3, draw.random() < 0.3
            scale = make_scale(values, unit, from_zero=from_zero, log=log, tight=draw.random() < 0.5)
            assert scale.low < scale.high
            places = [scale.place(value) for value in values]
            assert all(0 <= place <= 1 for place in places)
            assert [scale.place(value) for value in sorted(values)] == sorted(places)
            assert len(scale.ticks) <= 9
            near = 1e-6 * (scale.high - scale.low)
            assert all(scale.low - near <= tick <= scale.high + near for tick in scale.ticks)

    def test_marks_are_round(self):
        assert make_scale([0, 9.7], "number").ticks == (0, 2, 4, 6, 8, 10)
        assert make_scale([0, 5 * 2**30], "bytes", from_zero=True).ticks == tuple(i * 2**30 for i in range(6))
        assert make_scale([0, 5400], "seconds", tight=True, most=6).ticks == tuple(900.0 * i for i in range(7))
        assert make_scale([1, 3], "step", tight=True).ticks == (1, 2, 3)

    def test_a_wide_range_of_losses_is_logarithmic(self):
        scale = make_scale([0.002, 3.0], "number", log=True)
        assert scale.log
        assert scale.ticks == pytest.approx((0.01, 0.1, 1.0))
        assert scale.place(math.sqrt(0.002 * 3)) == pytest.approx(0.5)
        assert not make_scale([0.0, 3.0], "number", log=True).log

    @pytest.mark.parametrize("value", [0.0, 1.0, -1e-300, 1e308, -1e308, 5e-324])
    def test_a_scale_of_one_value(self, value: float):
        scale = make_scale([value], "number")
        assert 0 <= scale.place(value) <= 1
        assert make_scale([value], "bytes", from_zero=True).low <= 0


class TestFigure:
    def test_a_line_is_drawn_where_its_values_lie(self):
        chart = figure((0, 0), (1, 10), (2, 5), from_zero=True, height=108)
        path = chart.one("path").attributes["d"]
        assert path == "M0 108L500 11.85L1000 59.92"  # eight pixels and a little air above
        assert [dot.attributes["cx"] for dot in chart.one("g", "line").all("circle")] == ["0.00%", "50.00%", "100.00%"]

    def test_a_gap_stays_a_gap(self):
        path = figure((0, 0), (1, 1), (2, math.nan), (3, 1), (4, math.inf), (5, 0)).one("path").attributes["d"]
        assert path.count("M") == 3

    def test_a_long_line_has_few_points_and_one_dot(self):
        line = figure(*((float(x), float(x % 7)) for x in range(5000)), most_points=100).one("g", "line")
        assert len(line.attributes["data-x"].split()) <= 100
        assert len(line.all("circle")) == 1

    def test_boundaries_stand_where_a_part_ends_and_have_a_row_of_words(self):
        plain = figure((0, 0), (100, 1)).one("svg", "plot")
        outside = Boundary(x=101, text="epoch 2")
        chart = figure((0, 0), (100, 1), boundaries=[Boundary(x=25, text="epoch <1>"), outside])
        (drawn,) = chart.all("g", "boundary")
        assert drawn.one("line").attributes["x1"] == "25.00%"
        assert drawn.one("text").text == "epoch <1>"
        picture = chart.one("svg", "plot")
        assert int(picture.attributes["height"]) > int(plain.attributes["height"])

    def test_steps_keep_all_their_digits(self):
        line = figure((999_998, 0), (999_999, 1), x="step").one("g", "line")
        assert line.attributes["data-x"] == "999998 999999"

    def test_points_without_an_x_are_left_out(self):
        assert "data-x" in figure((math.nan, 1), (1, 2)).one("g", "line").attributes
        assert "No value is a finite number." in figure((math.inf, 1)).text


@pytest.mark.parametrize(("last", "hidden"), [(3, []), (5, ["1", "3", "5"])])
def test_on_a_narrow_screen_every_second_word_of_many_is_hidden(last: int, hidden: list[str]):
    words = figure((0, 0), (last, 1), x="step").all("text", "tick")
    assert len(words) == last + 1
    assert [word.text for word in words if "odd" in word.attributes["class"].split()] == hidden


def used(folder: Path, points: list[tuple[float, float]], script: str, *further: Line, **given: Any) -> str:
    """Return a page with a line, and further ones, after a script has run, as Chromium has it then."""
    lines = [Line(label="a", style="val", points=points), *further]
    chart = line_chart("t", lines, **{"x": "step", "y": "number", **given})
    page = html_page("t", page_header("k", "t", "now"), [section("s", chart)])
    return after_script(page, script, folder)


# The user drags from 20% to 25% of the width.
DRAG = """
  const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
  plot.setPointerCapture = () => {};
  for (const [name, share] of [["pointerdown", 0.2], ["pointermove", 0.25], ["pointerup", 0.25]]) {
    const place = { clientX: box.left + share * box.width, clientY: box.top + 20 };
    plot.dispatchEvent(new PointerEvent(name, { ...place, bubbles: true, pointerType: "mouse" }));
  }
"""
# The user takes the other scale once, or twice.
SWITCH = """
  for (const button of document.querySelectorAll(".tools button")) {
    if (button.textContent === "Log scale") button.click();
  }
"""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    ("x", "last", "words"),
    [
        ("step", 1000, ["200", "210", "220", "230", "240", "250"]),
        ("seconds", 14_400, [*(f"{n} min" for n in range(48, 60, 2)), "1 h"]),
        # Weeks, for which steps of half a day would be too many.
        ("seconds", 36_000_000, ["86 d 19 h", "92 d 14 h", "98 d 9 h", "104 d 4 h"]),
    ],
)
def test_an_enlarged_range_has_ticks_of_its_own(tmp_path: Path, x: str, last: int, words: list[str]):
    dumped = used(tmp_path, [(last * n / 100, float(n % 7)) for n in range(101)], DRAG, x=x)
    ticks = re.findall(r'<text class="tick fresh" x="([\d.e-]+)%"[^>]*>([^<]*)', dumped)
    assert [word for _, word in ticks] == words
    assert [round(float(place)) for place, _ in ticks] == sorted({round(float(place)) for place, _ in ticks})


@pytest.mark.slow
@needs_browser
def test_the_pointer_tells_the_lines_that_have_values_there(tmp_path: Path):
    short = Line(label="b", style="c3 dashed run-1", points=[(0.0, 4.0), (10.0, 5.0)])
    dumped = used(tmp_path, [(float(x), float(x)) for x in range(0, 101, 4)], DRAG, short)
    (told,) = re.findall(r'<div class="tip"[^>]*>(.*?)</div>', dumped, re.DOTALL)
    # The drag ends at a quarter of the width, where the short line has ended long before.
    assert re.sub("<.*?>", "", told) == "step 24\na  24"
    dumped = used(tmp_path, [(0, 1), (100, 2)], DRAG, short)
    (told,) = re.findall(r'<div class="tip"[^>]*>(.*?)</div>', dumped, re.DOTALL)
    assert re.sub("<.*?>", "", told) == "step 10\na  1\nb  5"
    assert [key.split() for key in re.findall(r'<i class="key ([^"]*)">', told)] == [["val"], ["c3", "dashed"]]


@pytest.mark.slow
@needs_browser
def test_an_axis_is_logarithmic_and_linear_again(tmp_path: Path):
    points = [(0, 0.01), (1, math.nan), (2, 0.1), (3, 1.0)]

    def seen(script: str) -> tuple[list[int], list[str]]:
        dumped = used(tmp_path, points, script)
        heights = re.findall(r'<circle[^>]* cy="([\d.]+)"', dumped)
        (words,) = re.findall(r'<svg class="labels".*?</svg>', dumped)
        # The path has its gap where the value is no number.
        assert re.findall(r'd="(M\S+) [\d.]+(M\S+) [\d.]+(L\S+) [\d.]+"', dumped)
        return [round(float(height)) for height in heights], re.findall(">([^<]+)<", words)

    before = seen("")
    assert before == ([193, 177, 15], ["0", "0.2", "0.4", "0.6", "0.8", "1"])
    assert seen(SWITCH) == ([200, 104, 8], ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1"])
    assert seen(2 * SWITCH) == before


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(("least", "unit"), [(0.0, "number"), (0.2, "number"), (0.001, "bytes")])
def test_where_no_decade_is_spanned_there_is_no_switch(tmp_path: Path, least: float, unit: str):
    dumped = used(tmp_path, [(0, least), (1, 1.0)], "", y=unit)
    assert ">CSV</button>" in dumped
    assert ">Log scale</button>" not in dumped
