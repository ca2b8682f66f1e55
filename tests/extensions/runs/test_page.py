"""The page of runs, taken apart by a parser: what it holds, that nothing in it runs, and how large it can get."""

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from equipoise.extensions.runs.command.page import runs_page
from equipoise.extensions.runs.run import Run, Unreadable
from tests.extensions.common.page.browser import after_script, needs_browser
from tests.extensions.common.page.parsing import Element, check_closed, parse, sections

ATTACK = '"></title></script></style><script>alert(1)</script><img src=x onerror=\'a()\' alt="b">&amp;'


def run(number: int, name: str = "", **given: Any) -> Run:
    values: dict[str, Any] = {
        "state": "finished",
        "epochs": 1,
        "steps": 20,
        "seconds": 60.0,
        "peak_memory": {"cpu": 2**30},
        "curves": {"val_loss": {9.0: 1.0 + number, 19.0: 0.5}},
        "times": {0.0: 0.0, 10.0: 20.0, 20.0: 60.0},
        "configuration": {"module.lr": f"0.{number}", "seed": f"{number}"},
        "origin": {"torch": "2.13.0", "commit": f"{number}" * 8},
    }
    return Run(folder=Path(f"runs/{number}"), name=name or f"runs/{number}", **{**values, **given})


def page(*runs: Run, unreadable: Any = ()) -> Element:
    return parse(runs_page(runs, unreadable, Path(".")))


def lines(section: Element) -> list[tuple[str, str, str]]:
    found = section.all("g", "line")
    return [(each.attributes["data-label"], each.attributes["data-x"], each.attributes["data-y"]) for each in found]


def test_runs_stand_side_by_side_above_what_was_run_with_versions_and_commits():
    failed = run(2, state="failed", error="ValueError: no", curves={}, times={}, began=2.0)
    first = run(1, report=Path("runs/1/report.html"), began=1.0)
    found = sections(page(failed, first, unreadable=[Unreadable(Path("x"), "bad")]))
    assert list(found) == ["Best job", "Runs", "Curves by step", "Curves by time", "What was run", "Not read"]
    table = found["Runs"].one("table", "runs")
    heads = [head.text for head in table.all("th")]
    # Results come first. Last values are the best ones here.
    assert heads == ["Run", "State", "best val_loss", "module.lr", "seed", *heads[5:]]
    second, first = ([cell.text for cell in row.all("td")] for row in table.one("tbody").all("tr"))
    assert first == ["1", "finished", "0.5000", "0.1", "1", "1", "20", "1:00", "1.0 GiB"]
    assert second[2:5] == ["", "0.2", "2"]
    assert table.one("a").attributes["href"] == "runs/1/report.html"
    assert lines(found["Curves by step"]) == [("1", "9 19", "2 0.5")]
    # Ten steps are done after 20 seconds.
    assert lines(found["Curves by time"]) == [("1", "20 60", "2 0.5")]
    rows = [[cell.text for cell in row.all("td")] for row in found["What was run"].one("tbody").all("tr")]
    assert rows == [
        ["2", "runs/2", "module.lr: 0.1 → 0.2, and 1 more", "22222222"],
        ["1", "runs/1", "the first run", "11111111"],
    ]
    assert "The same in all runs: torch: 2.13.0." in found["What was run"].text
    assert [cell.text for cell in found["Not read"].all("td")] == ["x", "bad"]


def test_each_line_belongs_to_a_row():
    document = page(*(run(number) for number in range(20)))
    rows = [row.attributes["data-run"] for row in document.one("table", "runs").one("tbody").all("tr")]
    assert rows == [str(number) for number in range(20)]
    charts = document.all("div", "overlaid")
    for line in [line for chart in charts for line in chart.all("g", "line")]:
        number = line.attributes["data-label"]
        assert f"run-{number}" in line.attributes["class"].split()


def test_a_last_value_that_is_no_best_one_has_a_column():
    table = page(run(1, curves={"val_loss": {9.0: 0.5, 19.0: 0.75}}), run(2)).one("table", "runs")
    assert [head.text for head in table.all("th")][2:4] == ["best val_loss", "last val_loss"]
    assert [cell.text for cell in table.one("tbody").all("tr")[0].all("td")][2:4] == ["0.5000", "0.7500"]


def test_a_metric_of_one_value_in_each_run_is_neither_best_nor_last():
    curves = {"val_acc": {9.0: 0.5, 19.0: 0.75}, "test_acc": {20.0: 0.625}}
    table = page(run(1, curves=curves), run(2, curves={"test_acc": {20.0: 0.5}})).one("table", "runs")
    assert [head.text for head in table.all("th")][2:4] == ["best val_acc", "test_acc"]
    assert [value.text for value in table.all("b")] == ["0.6250"]


def test_columns_are_sorted_from_their_best_value_and_numbers_stand_on_the_right():
    names = {"val_acc": {9.0: 0.5}, "val_loss": {9.0: 0.5}}
    runs = [run(number, curves=names, configuration={"lr": f"1e-{number}", "kind": "ab"[number]}) for number in (0, 1)]
    heads = {head.text: head.attributes for head in page(*runs).one("table", "runs").all("th")}
    assert {name for name, attributes in heads.items() if "data-first" in attributes} == {"val_acc"}
    assert {name for name, attributes in heads.items() if "number" not in attributes.get("class", "")} == {
        *("Run", "State", "kind")
    }


@pytest.mark.slow
@needs_browser
def test_a_first_click_puts_the_best_value_on_top_and_a_second_one_the_worst(tmp_path: Path):
    values = (0.25, 0.75, 0.5)
    runs = [
        run(number, curves={"val_acc": {9.0: value}, "val_loss": {9.0: 1 - value}})
        for number, value in enumerate(values)
    ]
    html = runs_page(runs, (), tmp_path)

    def order(column: int, clicks: int) -> list[str]:
        script = f"document.querySelectorAll('.runs th button')[{column}].click();" * clicks
        return re.findall(r'<tr data-run="(\d)"', after_script(html, script, tmp_path))

    # Of accuracies the greatest is the best, of losses the least.
    assert [order(2, 1), order(2, 2)] == [["1", "2", "0"], ["0", "2", "1"]]
    assert [order(3, 1), order(3, 2)] == [["1", "2", "0"], ["0", "2", "1"]]


def test_values_that_look_the_same_stand_out_together():
    runs = [run(number, curves={"val_acc": {9.0: value}}) for number, value in enumerate((0.98518519, 0.985185, 0.9))]
    assert [value.text for value in page(*runs).one("table", "runs").all("b")] == ["0.9852", "0.9852"]


def test_charts_that_are_left_out_are_counted():
    curves = {f"metric {number}": {1.0: 0.0, 2.0: 1.0} for number in range(30)}
    found = sections(page(run(1, curves=curves), run(2, curves=curves)))
    assert len(found["Curves by step"].all("figure")) == 24
    assert "24 of 30 metrics" in found["Curves by step"].text


def test_an_error_is_a_line_that_opens():
    error = "RuntimeError: " + "much too long, " * 20
    row = page(run(1, state="failed", error=error), run(2)).one("table", "runs").one("tbody").all("tr")[0]
    button = row.one("button")
    assert len(button.one("span", "cause").text) == 80
    opened = row.one("div", "cause")
    assert opened.text == error
    assert opened.attributes["id"] == button.attributes["popovertarget"]
    assert row.attributes["data-state"] == "failed"


def test_twenty_runs_have_twenty_colours_that_stay_when_others_begin():
    def colours(runs: list[Run]) -> dict[str, str]:
        rows = page(*runs).one("table", "runs").one("tbody").all("tr")
        return {row.all("td")[0].text: row.one("i", "key").attributes["class"] for row in rows}

    twenty = [run(number, f"runs/job {number}", began=float(number)) for number in range(20)]
    before = colours(twenty)
    assert len(set(before.values())) == 20
    after = colours([run(20, "runs/job 20", began=20.0), *reversed(twenty)])
    assert after.items() >= before.items()
    assert "dashed" in after["job 20"]


def test_names_are_short_and_differ():
    def names(*paths: str) -> list[str]:
        runs = [run(number, path) for number, path in enumerate(paths)]
        rows = page(*runs).one("table", "runs").one("tbody").all("tr")
        return [row.all("td")[0].text for row in rows]

    assert names("multirun/2026-01-31/10-20-30-123456/0", "multirun/2026-01-31/10-20-30-123456/1") == ["0", "1"]
    jobs = ("multirun/2026-01-31/10-20-30-123456/0", "outputs/2026-02-01/10-00-00-1", "outputs/first")
    assert names(*jobs) == ["31 Jan 10:20:30 / 0", "01 Feb 10:00:00", "first"]
    same_second = ("outputs/2026-02-01/10-00-00-123456", "outputs/2026-02-01/10-00-00-789012")
    assert names(*same_second) == ["01 Feb 10:00:00.123", "01 Feb 10:00:00.789"]
    # The end of a path is as long as it must be.
    same_time = ("outputs/2026-02-01/10-00-00-123456", "others/2026-02-01/10-00-00-123456", "a/x", "b/x")
    assert names(*same_time) == [*same_time]


def test_the_best_job_of_a_sweep_is_named_with_its_overrides():
    folder = "multirun/2026-01-31/10-20-30-123456"
    jobs = []
    for number, rate in enumerate(("0.1", "0.01", "0.001")):
        overrides = [
            "trainer.max_epochs=2",
            f"module.lr={rate}",
            "data.sizes=[1, 2]" if number == 1 else "data.sizes=[1]",
        ]
        values = {"curves": {"val_loss": {9.0: abs(number - 1.0)}}, "overrides": overrides}
        jobs.append(run(number, f"{folder}/{number}", **values))
    document = page(*jobs)
    assert document.one("h1").text == "Sweep 31 Jan 10:20:30: 3 jobs by val_loss"
    best = sections(document)["Best job"]
    assert "Job 1 has the least val_loss, 0.0." in best.text
    # What all jobs have in common is left out.
    assert best.one("code").text == "module.lr=0.01 'data.sizes=[1, 2]'"
    (line,) = [each for each in document.all("g", "best") if each.attributes.get("data-x") == "9"][:1]
    assert "run-1" in line.attributes["class"].split()
    # Files of earlier versions name no overrides.
    (other,) = [sections(page(*(run(number, f"{folder}/{number}") for number in range(2))))["Best job"]]
    assert other.one("code").text == "module.lr=0.0 seed=0"


@pytest.mark.parametrize(
    ("jobs", "same"), [(2, ", like job 1."), (3, ", like job 1, job 2."), (6, ", like job 1, job 2, job 3 and 2 more.")]
)
def test_jobs_that_are_as_good_as_the_best_one_are_named(jobs: int, same: str):
    runs = [run(number, f"multirun/{number}", curves={"val_acc": {9.0: 0.5}}) for number in range(jobs)]
    worse = run(9, "multirun/9", curves={"val_acc": {9.0: 0.25}})
    assert f"Job 0 has the greatest val_acc, 0.5000{same}" in sections(page(*runs, worse))["Best job"].text


def test_a_resumed_run_has_no_times_of_the_process_before():
    resumed = run(1, times={15.0: 0.0, 20.0: 5.0})
    assert lines(sections(page(resumed))["Curves by time"]) == [("1", "5", "0.5")]
    assert "RunReport() notes them" in sections(page(run(1, times={})))["Curves by time"].text


def test_only_our_own_script_and_style_may_run_and_nothing_is_fetched():
    runs = [run(1, report=Path("runs/1/report.html")), run(2)]
    check_closed(runs_page(runs, (), Path(".")), may_link=True)


def test_text_of_others_stays_text():
    def hostile(number: int) -> Run:
        return run(
            number,
            ATTACK,
            error=ATTACK,
            curves={ATTACK: {1.0: 0.5}},
            configuration={ATTACK: f"{number}{ATTACK}"},
            origin={ATTACK: ATTACK, "commit": f"{number}{ATTACK}"},
            report=Path("javascript:alert(1)/report.html"),
        )

    document = page(hostile(1), hostile(2), unreadable=[Unreadable(Path(ATTACK), ATTACK)])
    assert [each.name for each in document if each.name in ("script", "style", "img")] == ["style", "script"]
    assert document.text.count("<script>alert(1)</script>") >= 15
    assert {link.attributes["href"] for link in document.all("a")} == {"javascript%3Aalert%281%29/report.html"}


def test_values_that_are_not_finite_and_runs_without_values_are_drawn():
    odd = run(1, curves={"loss": {0.0: math.nan, 1.0: math.inf}, "none": {}}, epochs=None, seconds=None, peak_memory={})
    document = page(odd, run(2, curves={}, configuration={}, origin={}))
    assert "No value is a finite number." in document.text
    assert sections(page())["Runs"].one("p").text == "There are none. equipoise fit begins one."


@pytest.mark.slow
def test_200_runs_stay_below_two_megabytes():
    draw = random.Random(1)
    steps = sorted(draw.sample(range(10_000_000), 254))
    runs = []
    for number in range(1000):
        values = {
            "curves": {f"val_{name}": {float(step): draw.random() for step in steps} for name in "abcdefgh"},
            "configuration": {f"module.{'long' * 20}{key}": f"{draw.random()}" * 20 for key in range(20)},
            "origin": {"command": "x" * 400 + str(number), "commit": f"{number:040}"},
            "times": {0.0: 0.0, 1e7: 1e5},
        }
        name = f"multirun/2026-01-01/10-00-00-000000/{number}"
        runs.append(run(number, name, error="e" * 500, state="failed", **values))
    text = runs_page(runs, [Unreadable(Path("x" * 300), "y" * 300)] * 500, Path("."))
    assert 500_000 < len(text.encode()) < 2_000_000
    found = sections(parse(text))
    assert "the first 200 of 1,000" in found["Runs"].text
    assert len(lines(found["Curves by step"])) == len(lines(found["Curves by time"])) == 800


class TestParallelCoordinates:
    def paths(self, document: Element) -> dict[str, str]:
        picture = sections(document)["Parallel coordinates"].one("svg", "parallel")
        found = [each for each in picture.all("g") if "line" in each.attributes["class"].split()]
        return {each.attributes["class"].split()[-1]: each.one("path").attributes["d"] for each in found}

    @pytest.mark.parametrize(
        ("rates", "middle"),
        [
            # Rates of four magnitudes lie evenly, from the bottom at 230 to the top at 30.
            (("0.001", "0.1", "10"), 130),
            # A decade is enough, and two different ones.
            (("0.01", "0.0316228", "0.1"), 130),
            (("1", "3", "3"), 30),
        ],
    )
    def test_each_run_has_a_line_through_what_differs_and_the_result(self, rates: tuple[str, ...], middle: int):
        runs = [
            run(number, configuration={"module.lr": rate}, curves={"val_loss": {1.0: float(number)}})
            for number, rate in enumerate(rates)
        ]
        document = page(*runs)
        assert self.paths(document) == {
            "run-0": "M60 230L940 230",
            "run-1": f"M60 {middle}L940 130",
            "run-2": "M60 30L940 30",
        }
        words = [each.text for each in sections(document)["Parallel coordinates"].all("text")]
        assert [word for word in words if word[0].isalpha()] == ["module.lr", "best val_loss"]

    @pytest.mark.parametrize(
        ("decades", "words"),
        [(1.5, ["0.1", "0.2", "0.5", "1", "2", "3.162"]), (4, ["0.1", "1", "10", "100", "1,000"])],
    )
    def test_a_logarithmic_axis_has_round_numbers(self, decades: float, words: list[str]):
        rates = [10 ** (decades * number / 19 - 1) for number in range(20)]
        runs = [
            run(number, configuration={"lr": f"{rate:.6g}"}, curves={"val_loss": {1.0: float(number)}})
            for number, rate in enumerate(rates)
        ]
        found = [each.text for each in sections(page(*runs))["Parallel coordinates"].all("text")]
        assert found[1 : len(words) + 1] == words

    def test_texts_have_their_order_and_missing_values_a_gap(self):
        names = ("b", "a", None)
        runs = []
        for number, name in enumerate(names):
            configuration = {"kind": name} if name else {}
            runs.append(run(number, configuration=configuration, curves={"val_loss": {1.0: float(number)}}))
        paths = self.paths(page(*runs))
        assert paths["run-0"].startswith("M60 30L")
        assert paths["run-1"].startswith("M60 230L")
        assert paths["run-2"] == "M940 30"

    def test_two_runs_and_runs_that_are_the_same_have_none(self):
        assert "Parallel coordinates" not in sections(page(run(1), run(2)))
        assert "Parallel coordinates" not in sections(page(*(run(1) for _ in range(4))))
