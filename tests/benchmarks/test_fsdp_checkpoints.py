"""The benchmark of sharded checkpoints runs, and tells what is too slow."""

from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from tests.support.benchmarks import Scripts


@pytest.fixture
def main(scripts: Scripts) -> ModuleType:
    """The benchmark's script."""
    return scripts("fsdp_checkpoints", "main")["main"]


class Saving:
    """A trainer that counts its checkpoints."""

    def __init__(self) -> None:
        self.strategy = mock.Mock()
        self.strategy.portable.folders = None
        self.paths: list[Any] = []

    def save_checkpoint(self, path: Any) -> None:
        self.paths.append(path)


def test_the_clock_covers_whole_intervals(main: ModuleType, tmp_path: Path) -> None:
    clock, trainer = main.Clock(interval=3, intervals=2, path=tmp_path), Saving()
    saved_at = []
    with mock.patch.object(main.time, "perf_counter", side_effect=[5.0, 5.6]):
        for step in range(main.WARM_UP + 8):
            before = len(trainer.paths)
            clock.on_train_batch_end(trainer, None, None, None, step)
            if len(trainer.paths) > before:
                saved_at.append(step - main.WARM_UP)
    assert saved_at == [0, 3]
    assert clock.seconds == pytest.approx(0.1)


def test_the_checkpoint_has_the_promised_size(main: ModuleType) -> None:
    count = sum(parameter.numel() for parameter in main.Network().parameters())
    assert 100e6 <= count * 3 * 4 <= 102e6


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
