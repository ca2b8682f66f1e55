"""The benchmark of sharded checkpoints runs, and tells what is too slow."""

from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from tests.support.benchmarks import Scripts


@pytest.fixture
def main(scripts: Scripts) -> ModuleType:
    """The benchmark's script."""
    return scripts("fsdp_checkpoints", "main")["main"]


@pytest.mark.parametrize(("factor", "code"), [(1.09, 0), (1.11, 1)])
def test_a_broken_bound(factor: float, code: int, main: ModuleType, tmp_path: Path) -> None:
    def measured(way: str, *_: object) -> tuple[float, int]:
        return (factor if "background" in way else 1.0), 0

    with mock.patch.object(main, "time_of_step", measured):
        assert main.main(["--rounds", "1", "--check", "--folder", str(tmp_path)]) == code
        assert main.main(["--rounds", "1", "--folder", str(tmp_path)]) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_command(main: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rounds", "1", "--interval", "2", "--intervals", "1", "--width", "8", "--folder", str(tmp_path)]
    assert main.main(options) == 0
    printed = capsys.readouterr().out
    assert all(way in printed for way in main.WAYS)
    assert not list(tmp_path.iterdir())
