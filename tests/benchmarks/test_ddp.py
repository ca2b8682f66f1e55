"""The DDP benchmark runs, tells what is too slow, and leaves no process."""

from pathlib import Path
from unittest import mock

import pytest

from tests.support.benchmarks import Modules, Scripts

MODULES = ("main", "launches")


@pytest.fixture
def benchmark(scripts: Scripts) -> Modules:
    """The benchmark's scripts, by name."""
    return scripts("ddp", *MODULES)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_command(benchmark: Modules, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "table.md"
    assert benchmark["main"].main(["--rounds", "1", "--steps", "2", "--markdown", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "A second fit, of two steps, takes" in printed
    table, sentence = page.read_text().split("\n\n")
    titles, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    assert titles == ["network", "by hand, ms", "torch", "native", "torch / by hand", "native / torch"]
    assert [name for name, *_ in rows] == ["MLP", "convolutions"]
    assert all(float(cell) > 0 for _, *cells in rows for cell in cells)
    assert sentence.startswith("A second fit")


@pytest.mark.parametrize(("factor", "code"), [(1.04, 0), (1.06, 1)])
@pytest.mark.filterwarnings("ignore")
def test_a_broken_bound(factor: float, code: int, benchmark: Modules) -> None:
    """One way is slower than another by a factor; nothing is measured."""
    main = benchmark["main"]

    def by_trainer(engine: str, *_: object) -> float:
        return factor if engine == "torch" else 0.9

    with (
        mock.patch.object(main, "by_hand", return_value=1.0),
        mock.patch.object(main, "by_trainer", by_trainer),
        mock.patch.object(main, "second_start", return_value=0.5),
    ):
        assert main.main(["--rounds", "1", "--check"]) == code
        assert main.main(["--rounds", "1"]) == 0


def test_launches_end_in_order(benchmark: Modules, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark["launches"].main(["--count", "2"]) == 0
    assert "2 launches, all ended in order; processes left: 0." in capsys.readouterr().out
