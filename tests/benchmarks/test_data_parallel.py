"""The data-parallel benchmark runs, and what it compares with is right."""

from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from tests.support.benchmarks import Scripts


@pytest.fixture
def benchmark(scripts: Scripts) -> ModuleType:
    """The benchmark's script."""
    return scripts("data_parallel", "main")["main"]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_the_command(benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(benchmark, "PAIRS", benchmark.PAIRS[:1]):
        tables = tmp_path / "tables.md"
        code = benchmark.main(["--rounds", "1", "--steps", "8", "--replications", "2", "--markdown", str(tables)])
    assert code == 0
    assert "A replica of 218 modules" in capsys.readouterr().out
    assert tables.read_text().count("\n| --- ") == 3
