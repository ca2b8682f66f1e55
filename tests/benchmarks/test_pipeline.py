"""The pipeline benchmark runs on something small, its search finds the best, and its verdicts are right."""

from pathlib import Path
from unittest import mock

import pytest

from tests.support.benchmarks import Modules, Scripts

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def benchmark(scripts: Scripts) -> Modules:
    """The benchmark's scripts, by name."""
    return scripts("pipeline", "networks", "cuts", "sleeping", "main")


@pytest.mark.slow
def test_the_command(benchmark: Modules, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, main = tmp_path / "tables.md", benchmark["main"]
    command = "--steps 1 --rounds 1 --devices 2 --replica-devices 2 --micro-batches 1 2 --small"
    with mock.patch.object(main, "FORWARD", 1e-4), mock.patch.object(main, "BACKWARD", 1e-4):
        assert main.main([*command.split(), "--markdown", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "What measuring and choosing take" in printed
    tables = page.read_text().split("\n\n")[1::2]
    assert [len(table.splitlines()) - 2 for table in tables] == [20, 2, 6, 2, 2]
