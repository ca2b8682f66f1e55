"""The benchmark of speed: loops take turns, rows over their bounds are measured again, the chart shows the history."""

from itertools import count
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from tests.support.benchmarks import Modules, Scripts


@pytest.fixture
def benchmark(scripts: Scripts) -> Modules:
    """The benchmark's scripts, by name."""
    shared = scripts("overhead", "workload", "by_hand", "frameworks", "import_time")
    return shared | scripts("speed", "turns", "loops", "history", "main")


def options(main: ModuleType) -> Any:
    return main.argparse.Namespace(steps=1, starts=1, planted=0.0)


def test_loops_take_turns_and_their_ratio_is_that_of_their_steps(benchmark: Modules) -> None:
    turns = benchmark["turns"]
    # It is read before and after the step of the hand-written loop, which takes 2 s; the other one takes 3 s.
    clock = (second for turn in count() for second in (5.0 * turn, 5.0 * turn + 2))
    with mock.patch.object(turns, "process_time", clock.__next__):
        both = turns.Turns(8)
        benchmark["by_hand"].train(both.data)
    assert len(both.times) == len(both.times_by_hand) == turns.WARM_UP + 8
    assert both.ratio() == pytest.approx(3 / 2)


@pytest.mark.parametrize(
    ("ratios", "code"),
    [
        ({"bare step": [0.95, 0.9, 0.89]}, 0),
        ({"bare step": [0.95, 0.9, 0.94]}, 1),
        ({"control": [1.04, 1.0, 1.01], "bare step": [0.9]}, 0),
        ({"control": [0.96, 0.96, 1.0], "bare step": [0.95, 0.95, 0.95]}, 2),
    ],
)
def test_the_median_of_three_decides_on_a_row_that_is_over_its_bound(
    ratios: dict[str, list[float]], code: int, benchmark: Modules
) -> None:
    main = benchmark["main"]
    rows = [row for row in main.make_rows() if row.name in ratios]
    left = {name: list(values) for name, values in ratios.items()}
    with mock.patch.object(main, "measure", lambda names, _: {name: left[name].pop(0) for name in names}):
        main.measure_until_certain(rows, options(main))
    assert {row.name: row.ratios for row in rows} == ratios
    assert main.conclude(rows, Console(quiet=True)) == code


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_each_row_is_measured(benchmark: Modules) -> None:
    loops = benchmark["loops"]
    named = {row.name for row in benchmark["main"].make_rows()} - {"import", "first step"}
    assert {loops.LOGGED, *loops.LOOPS} - named == {"logging step"}
    ratios = loops.measure_rows([*loops.LOOPS, loops.LOGGED], 50)
    assert all(ratio > 0 for name, ratio in ratios.items() if name != loops.LOGGED)


@pytest.mark.slow
def test_the_command(benchmark: Modules, capsys: pytest.CaptureFixture[str]) -> None:
    main = benchmark["main"]
    rows = [main.Row("control", "a / a", 9.0), main.Row("import", "b / c", 9.0)]
    with mock.patch.object(main, "make_rows", return_value=rows):
        assert main.main(["--starts", "1", "--steps", "20"]) in (0, 2)
    assert "import" in capsys.readouterr().out


def test_the_chart_is_that_of_the_history(benchmark: Modules) -> None:
    history = benchmark["history"]
    assert history.CHART.read_text(encoding="utf-8") == history.draw(history.read())
